//! A disk that can lose its power: a FUSE file system with one file, `disk`, which a loop device
//! stands on. What was written since the last flush may be there after a power cut or not, sector
//! by sector. See `ebb_testkit::power`.

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(at), Some(bytes)) = (arguments.next(), arguments.next()) else {
        return Err(std::io::Error::other("usage: ebb-power-disk DIRECTORY BYTES"));
    };
    let bytes = bytes.parse().map_err(std::io::Error::other)?;
    ebb_testkit::power::serve(at.as_ref(), bytes)
}
