//! Compiles proto/ebb.proto with protox, so that no system protoc is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=../../proto/ebb.proto");
    let descriptors = protox::compile(["ebb.proto"], ["../../proto"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
