//! The metadata service that the daemon of a cache had joined, as `ebb recover` sees it: it may be
//! there and know more than the cache, and what answers at its address may be another job's by now.

use ebb_fs_client::config::MountConfig;
use ebb_fs_client::leftover::Leftover;
use ebb_meta_client::{ConnectError, service_status};
use ebb_transport::auth::Token;
use std::path::Path;
use std::time::Duration;

/// It is only asked for the sake of a note.
const LIMIT: Duration = Duration::from_secs(2);

/// Whose the service is that answers.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Found {
    /// Of the job that the cache is of.
    Same,
    /// Of another one.
    Another,
    /// It, or the cache, does not tell.
    Untold,
    /// None, and why.
    Nobody(String),
}

/// What the user should know of the service at `meta`.
pub fn note(meta: &str, cache: &Path, config: &MountConfig, left: &Leftover) -> String {
    let found = match job_at(meta, config) {
        Ok(job) => whose(job, left),
        Err(why) => Found::Nobody(why),
    };
    text(meta, cache, found)
}

fn whose(job: u64, left: &Leftover) -> Found {
    let own = left.found().and_then(|f| f.image.life.as_ref()).map_or(0, |l| l.job);
    match (job, own) {
        (0, _) | (_, 0) => Found::Untold,
        _ if job == own => Found::Same,
        _ => Found::Another,
    }
}

/// The job of the service at `meta`; 0 from one that does not tell.
fn job_at(meta: &str, config: &MountConfig) -> Result<u64, String> {
    let token = config.token_file.as_deref().map(Token::load).transpose();
    let token = token.map_err(|e| format!("metadata service {meta}: {e}"))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| format!("metadata service {meta}: {e}"))?;
    let asked = service_status(meta, token.as_ref(), config.secure, LIMIT);
    runtime.block_on(asked).map(|reply| reply.job).map_err(|e: ConnectError| e.to_string())
}

fn text(meta: &str, cache: &Path, found: Found) -> String {
    let better =
        format!("`ebb mount --meta {meta} --cache {} ...` is the better way", cache.display());
    match found {
        Found::Same => format!(
            "the metadata service {meta} of this job is there and may know more than this cache: \
             {better}"
        ),
        Found::Another => format!(
            "the metadata service at {meta} is of another job and knows nothing of this cache: it \
             is left alone"
        ),
        Found::Untold => format!(
            "a metadata service answers at {meta}: if it is still the one of this job, it may know \
             more than this cache, and {better}"
        ),
        Found::Nobody(why) => format!(
            "{why}; what it knew beyond this cache is not used. Where the service of this job can \
             be started again, {better}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_jobs_service_is_not_recommended() {
        let say = |found| text("h:7", Path::new("/c"), found);
        for found in [Found::Same, Found::Untold, Found::Nobody("h:7: refused".into())] {
            assert!(say(found).contains("`ebb mount --meta h:7 --cache /c ...`"));
        }
        assert!(!say(Found::Another).contains("ebb mount"));
        assert!(say(Found::Nobody("h:7: refused".into())).starts_with("h:7: refused; "));
    }
}
