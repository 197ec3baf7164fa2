//! The calls that are traced. Their numbers are part of the format: new ones go to the end.

macro_rules! calls {
    ($($name:ident $text:literal,)*) => {
        /// A function that a traced program called.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum Call {
            $(#[doc = $text] $name,)*
        }

        impl Call {
            /// Every call, in the order of their numbers.
            pub const ALL: &'static [Call] = &[$(Call::$name,)*];

            /// Its name.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Call::$name => $text,)* }
            }
        }
    };
}

calls! {
    Start "start", Exit "exit", Open "open", Openat "openat", Creat "creat", Close "close",
    Dup2 "dup2", Read "read", Write "write", Pread "pread", Pwrite "pwrite", Readv "readv",
    Writev "writev", Preadv "preadv", Pwritev "pwritev", Fsync "fsync", Fdatasync "fdatasync",
    Ftruncate "ftruncate", Truncate "truncate", Fallocate "fallocate", Mmap "mmap", Msync "msync",
    Munmap "munmap", Fcntl "fcntl", Lockf "lockf", Flock "flock", CopyFileRange "copy_file_range",
    Sendfile "sendfile", Fopen "fopen", Fdopen "fdopen", Freopen "freopen", Fclose "fclose",
    Fread "fread", Fwrite "fwrite", Fflush "fflush", Fseek "fseek", Stdio "stdio", Fork "fork",
    Spawn "posix_spawn", System "system", Popen "popen", Wait "wait", Exec "exec",
    MpiInit "MPI_Init", MpiFinalize "MPI_Finalize", MpiSend "MPI_Send", MpiRecv "MPI_Recv",
    MpiWait "MPI_Wait", MpiBarrier "MPI_Barrier", MpiBcast "MPI_Bcast", MpiReduce "MPI_Reduce",
    MpiAllreduce "MPI_Allreduce", MpiGather "MPI_Gather", MpiScatter "MPI_Scatter",
    MpiAllgather "MPI_Allgather", MpiAlltoall "MPI_Alltoall", MpiScan "MPI_Scan",
    MpiComm "MPI_Comm", MpiFileOpen "MPI_File_open", MpiFileClose "MPI_File_close",
    MpiFileSync "MPI_File_sync", MpiFileSize "MPI_File_set_size", Setxattr "setxattr",
}

impl Call {
    /// The call of that number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Call> {
        Call::ALL.get(usize::from(number)).copied()
    }
}
