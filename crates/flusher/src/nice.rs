//! Puts the calling thread behind the application's, for CPU and disk.

use crate::options::{IoClass, Options};

/// From <linux/ioprio.h>; libc has no constants for these.
const IOPRIO_WHO_PROCESS: libc::c_int = 1;
const IOPRIO_CLASS_SHIFT: libc::c_int = 13;
const IOPRIO_CLASS_BE: libc::c_int = 2;
const IOPRIO_CLASS_IDLE: libc::c_int = 3;
const IOPRIO_LOWEST_LEVEL: libc::c_int = 7;

/// Best effort: a kernel or container that refuses costs speed, not correctness.
pub(crate) fn yield_to_foreground(options: &Options) {
    // On Linux "process 0" is the calling thread alone.
    if let Err(e) = rustix::process::setpriority_process(None, options.nice) {
        tracing::debug!("flusher: niceness {} refused: {e}", options.nice);
    }
    let priority = match options.io_class {
        IoClass::Normal => return,
        IoClass::Low => IOPRIO_CLASS_BE << IOPRIO_CLASS_SHIFT | IOPRIO_LOWEST_LEVEL,
        IoClass::Idle => IOPRIO_CLASS_IDLE << IOPRIO_CLASS_SHIFT,
    };
    // SAFETY: ioprio_set takes three integers and touches no memory of ours.
    let refused =
        unsafe { libc::syscall(libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, priority) } != 0;
    if refused {
        tracing::debug!("flusher: I/O priority refused: {}", std::io::Error::last_os_error());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_calling_thread_steps_back() {
        let before = rustix::process::getpriority_process(None).unwrap();
        let there = std::thread::spawn(move || {
            yield_to_foreground(&Options { nice: before + 3, ..Options::default() });
            rustix::process::getpriority_process(None).unwrap()
        });
        assert_eq!(there.join().unwrap(), before + 3);
        assert_eq!(rustix::process::getpriority_process(None).unwrap(), before);
    }
}
