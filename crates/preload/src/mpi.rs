//! What the library that is built with the user's MPI tells (`mpi/ebb_trace_mpi.c`).

use crate::state::Guard;
use crate::tracer::At;
use ebb_trace_format::{Call, Flow, What};

/// A call of MPI: `kind` says what `arguments` are.
///
/// # Safety
/// `arguments` are as many as the kind has.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_trace_note(kind: u32, call: u32, arguments: *const u64, from: usize) {
    let Some(call) = u8::try_from(call).ok().and_then(Call::from_number) else { return };
    // SAFETY: see above.
    let of = |i: usize| unsafe { *arguments.add(i) };
    let small = |i: usize| of(i) as u32;
    let what = match kind {
        0 => What::World { comm: of(0), rank: small(1), size: small(2) },
        1 => What::Send { comm: of(0), from: small(1), to: small(2), tag: of(3) as i32 },
        2 => What::Recv {
            comm: of(0),
            from: small(1),
            to: small(2),
            tag: of(3) as i32,
            posted: of(4),
        },
        3 => {
            let flow = match of(5) {
                0 => Flow::All,
                1 => Flow::FromRoot,
                2 => Flow::ToRoot,
                _ => Flow::Prefix,
            };
            let (rank, size, root) = (small(2), small(3), small(4));
            What::Enter { comm: of(0), number: of(1), rank, size, root, flow }
        }
        4 => What::Leave { comm: of(0), number: of(1), rank: small(2) },
        5 => What::Asked,
        6 => What::Answered,
        _ => What::Unknown,
    };
    if let Some(mut tracer) = Guard::take() {
        tracer.settle_streams(call);
        tracer.record(At::now(call, from), what);
    }
}
