//! The Slurm prolog and epilog of `deploy/slurm`, called the way slurmd calls them, for the two
//! nodes of a job (which are two mount points of this machine).

use ebb_testkit::environment::ebb_binary;
use ebb_testkit::{describe, mounts, skip_reason};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;
use tempfile::TempDir;

/// A site with a configuration of its own. Dropping it takes every mount away.
struct Site {
    dir: TempDir,
    root: PathBuf,
    job: u32,
}

impl Site {
    fn new(epilog_limit: u32) -> Option<Site> {
        if skip_reason().is_some() {
            return None;
        }
        if !rustix::process::geteuid().is_root() {
            println!("skipped: slurmd runs hooks as root");
            return None;
        }
        let dir = TempDir::with_prefix("ebb-slurm-").expect("temporary directory");
        let root = dir.path().canonicalize().expect("it was just made");
        for name in ["pfs", "work", "run"] {
            std::fs::create_dir(root.join(name)).expect("directory");
        }
        let top = root.display();
        let text = format!(
            "EBB_HOOK_BACKING={top}/pfs\nEBB_HOOK_MOUNT={top}/mnt/%j-%n\n\
             EBB_HOOK_CACHE={top}/cache/%j-%n\nEBB_HOOK_SHARED={top}/shared\n\
             EBB_HOOK_OPTIONS='--flush end'\nEBB_HOOK_FEATURE=ebb\nEBB_HOOK_PORT=21000\n\
             EBB_HOOK_PROLOG_LIMIT=30\nEBB_HOOK_EPILOG_LIMIT={epilog_limit}\n\
             EBB_HOOK_LATE_LIMIT=1m\nEBB_HOOK_BIN={}\nEBB_HOOK_ADDRESS=127.0.0.1\n",
            ebb_binary().display()
        );
        std::fs::write(root.join("hook.conf"), text).expect("configuration");
        // Ports follow from the job number; tests that run side by side must not share them.
        Some(Site { dir, root, job: std::process::id() % 1_000_000 + epilog_limit })
    }

    fn hook(&self, name: &str, node: &str, constraints: &str) -> Output {
        self.hook_of("root", name, node, constraints)
    }

    fn hook_of(&self, user: &str, name: &str, node: &str, constraints: &str) -> Output {
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/slurm");
        let mut command = Command::new(scripts.join(name));
        for (variable, _) in std::env::vars_os() {
            if variable.to_string_lossy().starts_with("EBB_") {
                command.env_remove(variable);
            }
        }
        command
            .env("EBB_HOOK_CONF", self.root.join("hook.conf"))
            .env("SLURM_JOB_ID", self.job.to_string())
            .env("SLURM_JOB_USER", user)
            .env("SLURM_JOB_NODELIST", "n1,n2")
            .env("SLURM_JOB_CONSTRAINTS", constraints)
            .env("SLURM_JOB_WORK_DIR", self.root.join("work"))
            .env("SLURMD_NODENAME", node)
            .output()
            .expect("the hook can be started")
    }

    fn runs(&self, name: &str, node: &str) {
        let output = self.hook(name, node, "ebb");
        assert!(output.status.success(), "{name} on {node}: {}", describe(&output));
    }

    fn mount(&self, node: &str) -> PathBuf {
        self.root.join(format!("mnt/{}-{node}", self.job))
    }

    fn cache(&self, node: &str) -> PathBuf {
        self.root.join(format!("cache/{}-{node}", self.job))
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for node in ["n1", "n2"] {
            let _ = Command::new(ebb_binary())
                .args(["umount", "--no-drain"])
                .arg(self.mount(node))
                .output();
        }
        if !mounts::clear(&self.root) {
            self.dir.disable_cleanup(true);
        }
    }
}

#[test]
fn a_job_has_its_mount_on_every_node_and_leaves_nothing_but_its_files() {
    let Some(site) = Site::new(60) else { return };
    // The second node first: it must wait for the first one's service.
    std::thread::scope(|threads| {
        threads.spawn(|| site.runs("ebb-prolog", "n2"));
        std::thread::sleep(Duration::from_millis(300));
        threads.spawn(|| site.runs("ebb-prolog", "n1"));
    });
    let (first, second) = (site.mount("n1"), site.mount("n2"));
    assert!(mounts::is_mounted(&first) && mounts::is_mounted(&second));
    site.runs("ebb-prolog", "n1");
    std::fs::write(first.join("a"), "from n1").expect("write");
    std::fs::write(second.join("b"), "from n2").expect("write");
    assert_eq!(std::fs::read(second.join("a")).expect("read"), b"from n1");

    site.runs("ebb-epilog", "n1");
    site.runs("ebb-epilog", "n2");
    for (name, content) in [("a", "from n1"), ("b", "from n2")] {
        let drained = std::fs::read(site.root.join("pfs").join(name)).expect("drained");
        assert_eq!(drained, content.as_bytes());
    }
    site.runs("ebb-epilog", "n2");
    // The first node's service has ended by now, or does soon; its next epilog clears the cache.
    let clear = || {
        site.runs("ebb-epilog", "n1");
        !site.cache("n1").exists()
    };
    assert!(mounts::wait_until(Duration::from_secs(20), clear));
    assert!(!first.exists() && !second.exists() && !site.cache("n2").exists());
    let shared: Vec<_> = std::fs::read_dir(site.root.join("shared")).expect("directory").collect();
    assert!(shared.is_empty(), "{shared:?}");
    let told: Vec<_> = std::fs::read_dir(site.root.join("work")).expect("directory").collect();
    assert!(told.is_empty(), "{told:?}");
}

#[test]
fn a_job_without_the_feature_gets_no_mount_and_a_broken_site_no_error() {
    let Some(site) = Site::new(61) else { return };
    assert!(site.hook("ebb-prolog", "n1", "gpu").status.success());
    assert!(!site.mount("n1").exists());
    std::fs::remove_dir(site.root.join("pfs")).expect("remove");
    let output = site.hook("ebb-prolog", "n1", "gpu&ebb");
    assert!(output.status.success(), "a failing prolog would take the node out of service");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("not mounted") && said.contains("pfs"), "{said}");
    site.runs("ebb-epilog", "n1");
}

#[test]
fn the_epilog_after_a_crash_clears_the_mount_and_names_the_data() {
    let Some(site) = Site::new(62) else { return };
    site.runs("ebb-prolog", "n1");
    std::fs::write(site.mount("n1").join("precious"), [7; 5000]).expect("write");
    let status = std::fs::read(site.mount("n1").join(".ebb/status.json")).expect("status");
    let status: serde_json::Value = serde_json::from_slice(&status).expect("JSON");
    // First who would start another daemon.
    for pid in [&status["supervisor"]["pid"], &status["pid"]] {
        let killed = Command::new("kill").args(["-9", &pid.to_string()]).status();
        assert!(killed.expect("kill").success());
    }
    std::thread::sleep(Duration::from_millis(300));
    site.runs("ebb-epilog", "n1");
    assert!(!mounts::is_mounted(&site.mount("n1")));
    assert!(site.cache("n1").join("data").exists(), "data is never removed");
    let told = site.root.join(format!("work/ebb-{}.err", site.job));
    let told = std::fs::read_to_string(told).expect("the user is told");
    assert!(told.contains(&site.cache("n1").display().to_string()), "{told}");
}

/// What is in the directories of a job is the user's: the epilog runs as root, and his links must lead
/// it nowhere.
#[test]
fn the_epilog_follows_no_link_of_the_user() {
    let Some(site) = Site::new(63) else { return };
    const USER: u32 = 65_534;
    let (cache, own) = (site.cache("n1"), site.root.join("root-only"));
    std::fs::set_permissions(&site.root, PermissionsExt::from_mode(0o755)).expect("chmod");
    std::fs::create_dir_all(&cache).expect("cache");
    std::fs::create_dir(&own).expect("root's directory");
    std::fs::set_permissions(&own, PermissionsExt::from_mode(0o700)).expect("chmod");
    std::fs::write(own.join("ebb.log"), "root's").expect("write");
    symlink(own.join("nologin"), cache.join("lock")).expect("link");
    symlink(&own, cache.join("data")).expect("link");
    chown(&cache, Some(USER), Some(USER)).expect("chown");
    assert!(site.hook_of("nobody", "ebb-epilog", "n1", "ebb").status.success());
    assert!(!own.join("nologin").exists(), "root made a file through a user's link");
    assert!(own.join("ebb.log").exists() && own.exists());
}

/// Whatever may be the only copy of something stays, and the user hears of it.
#[test]
fn the_epilog_leaves_copies_and_states_and_the_token_that_others_need() {
    let Some(site) = Site::new(64) else { return };
    let shared = site.root.join("shared");
    let token = shared.join(format!("{}.token", site.job));
    let members = shared.join(format!("{}.nodes", site.job));
    for (node, kept) in [("n1", "copies/9-1/1"), ("n2", "meta/journal"), ("n3", "aside/f")] {
        let kept = site.cache(node).join(kept);
        std::fs::create_dir_all(kept.parent().expect("below the cache")).expect("directories");
        std::fs::write(&kept, "the only ones").expect("write");
        std::fs::create_dir_all(&members).expect("members");
        std::fs::write(members.join(node), "").expect("member");
        std::fs::write(&token, "secret").expect("token");
        site.runs("ebb-epilog", node);
        assert!(kept.exists(), "{kept:?}");
        assert!(token.exists(), "what is left may be brought back into the job with it");
        std::fs::remove_dir_all(site.cache(node)).expect("brought to the backing by hand");
        site.runs("ebb-epilog", node);
        assert!(!members.join(node).exists());
    }
    assert!(!token.exists(), "the last node takes it along");
    let told = std::fs::read_to_string(site.root.join(format!("work/ebb-{}.err", site.job)));
    assert_eq!(told.expect("the user is told").matches("files of the job are left").count(), 3);
    // One node of two is done: the other one still needs it.
    std::fs::create_dir_all(&members).expect("members");
    std::fs::write(&token, "secret").expect("token");
    for node in ["n1", "n2"] {
        std::fs::write(members.join(node), "").expect("member");
    }
    site.runs("ebb-epilog", "n1");
    assert!(token.exists());
    site.runs("ebb-epilog", "n2");
    assert!(!token.exists());
}
