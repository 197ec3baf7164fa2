//! Processes that come and go: what orders parents and children.

use crate::state::Guard;
use crate::tracer::At;
use crate::{hooks, real};
use ebb_trace_format::{Call, What};
use libc::{FILE, c_char, c_int, c_void, id_t, idtype_t, pid_t, rusage, siginfo_t};

hooks! {
    // A child that runs in its parent's memory could not be told from it; fork does all that vfork promises.
    0 fork, vfork => fork;
    1 wait => wait;
    3 waitpid => waitpid;
    3 wait3 => wait3;
    4 wait4 => wait4;
    4 waitid => waitid;
    1 system => system;
    2 popen => popen;
    1 pclose => pclose;
    1 _exit, _Exit => leave;
}

fn note(call: Call, from: usize, what: What) {
    if let Some(mut tracer) = Guard::take() {
        tracer.settle_streams(call);
        tracer.record(At::now(call, from), what);
    }
}

fn settle(call: Call) {
    if let Some(mut tracer) = Guard::take() {
        tracer.settle_streams(call);
    }
}

unsafe extern "C" fn fork(from: usize) -> pid_t {
    settle(Call::Fork);
    let pid = unsafe { real!(fork as fn() -> pid_t)() };
    match pid {
        // The first use in the child gives it a file of its own.
        0 => settle(Call::Fork),
        1.. => note(Call::Fork, from, What::Fork { pid: pid.cast_unsigned() }),
        _ => {}
    }
    pid
}

fn reaped(from: usize, pid: pid_t, status: c_int) {
    if pid > 0 && (libc::WIFEXITED(status) || libc::WIFSIGNALED(status)) {
        note(Call::Wait, from, What::Reaped { pid: pid.cast_unsigned() });
    }
}

unsafe fn waited(
    pid: pid_t,
    status: *mut c_int,
    options: c_int,
    usage: *mut rusage,
    from: usize,
) -> pid_t {
    let mut own = 0;
    let to = if status.is_null() { &raw mut own } else { status };
    let work = real!(wait4 as fn(pid_t, *mut c_int, c_int, *mut rusage) -> pid_t);
    let got = unsafe { work(pid, to, options, usage) };
    if got > 0 {
        // SAFETY: the call has written it.
        reaped(from, got, unsafe { *to });
    }
    got
}

unsafe extern "C" fn wait(status: *mut c_int, from: usize) -> pid_t {
    unsafe { waited(-1, status, 0, std::ptr::null_mut(), from) }
}

unsafe extern "C" fn waitpid(pid: pid_t, status: *mut c_int, options: c_int, from: usize) -> pid_t {
    unsafe { waited(pid, status, options, std::ptr::null_mut(), from) }
}

unsafe extern "C" fn wait3(
    status: *mut c_int,
    options: c_int,
    usage: *mut rusage,
    from: usize,
) -> pid_t {
    unsafe { waited(-1, status, options, usage, from) }
}

unsafe extern "C" fn wait4(
    pid: pid_t,
    status: *mut c_int,
    options: c_int,
    usage: *mut rusage,
    from: usize,
) -> pid_t {
    unsafe { waited(pid, status, options, usage, from) }
}

unsafe extern "C" fn waitid(
    which: idtype_t,
    id: id_t,
    info: *mut siginfo_t,
    options: c_int,
    from: usize,
) -> c_int {
    let work = real!(waitid as fn(idtype_t, id_t, *mut siginfo_t, c_int) -> c_int);
    let result = unsafe { work(which, id, info, options) };
    // SAFETY: the call has written it.
    if result == 0
        && let Some(info) = unsafe { info.as_ref() }
    {
        let is_end = matches!(info.si_code, libc::CLD_EXITED | libc::CLD_KILLED | libc::CLD_DUMPED);
        // SAFETY: what waitid fills in has these fields.
        let pid = unsafe { info.si_pid() };
        if is_end && pid > 0 {
            note(Call::Wait, from, What::Reaped { pid: pid.cast_unsigned() });
        }
    }
    result
}

unsafe extern "C" fn system(command: *const c_char, from: usize) -> c_int {
    note(Call::System, from, What::Spawning);
    let result = unsafe { real!(system as fn(*const c_char) -> c_int)(command) };
    note(Call::System, from, What::Spawned);
    result
}

unsafe extern "C" fn popen(command: *const c_char, mode: *const c_char, from: usize) -> *mut FILE {
    note(Call::Popen, from, What::Spawning);
    unsafe { real!(popen as fn(*const c_char, *const c_char) -> *mut FILE)(command, mode) }
}

unsafe extern "C" fn pclose(stream: *mut FILE, from: usize) -> c_int {
    let result = unsafe { real!(pclose as fn(*mut FILE) -> c_int)(stream) };
    note(Call::Popen, from, What::Spawned);
    result
}

/// Ends without what a normal end does: buffers of streams are lost, as the program wants it.
unsafe extern "C" fn leave(status: c_int, _from: usize) {
    if let Some(mut tracer) = Guard::take() {
        tracer.exit(false);
    }
    unsafe { real!(_exit as fn(c_int) -> ())(status) }
}

macro_rules! spawn {
    ($($name:ident)*) => {$(
        /// Six arguments leave no register for where it came from.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void,
            arguments: *const *mut c_char, environment: *const *mut c_char,
        ) -> c_int {
            let mut own = 0;
            let to = if pid.is_null() { &raw mut own } else { pid };
            settle(Call::Spawn);
            let work = real!($name as fn(*mut pid_t, *const c_char, *const c_void, *const c_void,
                *const *mut c_char, *const *mut c_char) -> c_int);
            let result = unsafe { work(to, path, actions, attributes, arguments, environment) };
            if result == 0 {
                // SAFETY: the call has written it.
                let pid = unsafe { *to }.cast_unsigned();
                note(Call::Spawn, 0, What::Fork { pid });
            }
            result
        }
    )*};
}

spawn! { posix_spawn posix_spawnp }
