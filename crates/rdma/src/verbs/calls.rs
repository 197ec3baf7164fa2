//! The calls of libibverbs and librdmacm, found when they are needed: one binary runs with and without
//! the libraries. Their types come from the headers (`rdma-sys`), and the compiler compares; what
//! is inline there goes through the context of a device and needs no library.

use rdma_sys::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_device_attr, ibv_mr, ibv_pd, ibv_qp_init_attr,
    ibv_srq, ibv_srq_init_attr, rdma_cm_event, rdma_cm_id, rdma_conn_param, rdma_event_channel,
    rdma_port_space,
};
use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

/// An open library.
struct Library(*mut c_void);

impl Library {
    fn open(name: &CStr) -> Result<Library, String> {
        // SAFETY: the name is a C string; the library's own constructors are trusted as those of any
        // library that a program is linked with.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        match handle.is_null() {
            false => Ok(Library(handle)),
            true => Err(last_error(name)),
        }
    }

    fn find(&self, name: &CStr) -> Result<*mut c_void, String> {
        // SAFETY: the handle is of an open library, which is never closed.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if found.is_null() { Err(last_error(name)) } else { Ok(found) }
    }
}

fn last_error(of: &CStr) -> String {
    // SAFETY: dlerror gives null or a C string that stays until the next call on this thread.
    let text = unsafe { libc::dlerror() };
    match text.is_null() {
        true => format!("{}: not found", of.to_string_lossy()),
        // SAFETY: as above.
        false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
    }
}

macro_rules! calls {
    ($($library:literal { $(fn $name:ident($($of:ty),*) -> $gives:ty;)* })*) => {
        /// What the libraries have.
        pub(crate) struct Calls {
            $($(pub $name: unsafe extern "C" fn($($of),*) -> $gives,)*)*
        }

        // Never called: fails to compile where a type differs from that of the header.
        $($(const _: unsafe extern "C" fn($($of),*) -> $gives = rdma_sys::$name;)*)*

        impl Calls {
            fn load() -> Result<Calls, String> {
                $($(let $name;)*)*
                $(
                    let library = Library::open($library)?;
                    $($name = {
                        let name = concat!(stringify!($name), "\0").as_bytes();
                        let name = CStr::from_bytes_with_nul(name).map_err(|e| e.to_string())?;
                        let found = library.find(name)?;
                        // SAFETY: a function of this name has the type of the header, compared above.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($of),*) -> $gives>(found) }
                    };)*
                )*
                Ok(Calls { $($($name,)*)* })
            }
        }
    };
}

calls! {
    c"libibverbs.so.1" {
        fn ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
        fn ibv_dealloc_pd(*mut ibv_pd) -> c_int;
        fn ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
        fn ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
        fn ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        fn ibv_destroy_cq(*mut ibv_cq) -> c_int;
        fn ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        fn ibv_ack_cq_events(*mut ibv_cq, u32) -> ();
        fn ibv_create_srq(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
        fn ibv_destroy_srq(*mut ibv_srq) -> c_int;
        fn ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        fn ibv_dereg_mr(*mut ibv_mr) -> c_int;
        fn ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    }
    c"librdmacm.so.1" {
        fn rdma_create_event_channel() -> *mut rdma_event_channel;
        fn rdma_destroy_event_channel(*mut rdma_event_channel) -> ();
        fn rdma_create_id(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, rdma_port_space::Type) -> c_int;
        fn rdma_destroy_id(*mut rdma_cm_id) -> c_int;
        fn rdma_bind_addr(*mut rdma_cm_id, *mut libc::sockaddr) -> c_int;
        fn rdma_listen(*mut rdma_cm_id, c_int) -> c_int;
        fn rdma_get_src_port(*mut rdma_cm_id) -> u16;
        fn rdma_resolve_addr(*mut rdma_cm_id, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
        fn rdma_resolve_route(*mut rdma_cm_id, c_int) -> c_int;
        fn rdma_create_qp(*mut rdma_cm_id, *mut ibv_pd, *mut ibv_qp_init_attr) -> c_int;
        fn rdma_destroy_qp(*mut rdma_cm_id) -> ();
        fn rdma_connect(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        fn rdma_accept(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        fn rdma_reject(*mut rdma_cm_id, *const c_void, u8) -> c_int;
        fn rdma_disconnect(*mut rdma_cm_id) -> c_int;
        fn rdma_set_option(*mut rdma_cm_id, c_int, c_int, *mut c_void, usize) -> c_int;
        fn rdma_get_cm_event(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int;
        fn rdma_ack_cm_event(*mut rdma_cm_event) -> c_int;
    }
}

/// The libraries, or why there are none here.
pub(crate) fn calls() -> Result<&'static Calls, String> {
    static LOADED: OnceLock<Result<Calls, String>> = OnceLock::new();
    LOADED.get_or_init(Calls::load).as_ref().map_err(Clone::clone)
}
