//! What `ebb recover` says of the metadata service that the cache's daemon had joined.

use ebb_testkit::{Cluster, describe, skip_reason};
use ebb_tests::recoveries::{recover, said};

/// A node with a service of its own has died, and something has happened to the service since. What
/// a recovery of its cache says.
fn recovered_after(happened: impl FnOnce(&mut Cluster)) -> Option<(String, String)> {
    if skip_reason().is_some() {
        return None;
    }
    let mut cluster = Cluster::builder().separate_meta().flush("end").start();
    let node = cluster.node(0);
    std::fs::write(node.path("f"), [5; 9000]).expect("write");
    node.kill9();
    let _ = node.ebb("umount", &[], &[]);
    happened(&mut cluster);
    let output = recover(&cluster, cluster.node(0), &[]);
    assert!(output.status.success(), "{}", describe(&output));
    assert_eq!(std::fs::read(cluster.backing().join("f")).expect("recovered"), [5; 9000]);
    let meta = cluster.meta_address().expect("a separate service").to_owned();
    Some((said(&output), format!("`ebb mount --meta {meta} --cache ")))
}

#[test]
fn the_service_of_the_job_is_recommended() {
    let Some((said, better)) = recovered_after(|_| ()) else { return };
    assert!(said.contains("of this job is there") && said.contains(&better), "{said}");
}

/// Where it was another job's service is by now: the same address, another state.
#[test]
fn the_service_of_another_job_is_not() {
    let began_anew = |cluster: &mut Cluster| {
        cluster.kill_meta();
        std::fs::remove_dir_all(cluster.meta_state()).expect("the state");
        cluster.restart_meta();
    };
    let Some((said, better)) = recovered_after(began_anew) else { return };
    assert!(said.contains("is of another job and knows nothing of this cache"), "{said}");
    assert!(!said.contains(&better) && !said.contains("better way"), "{said}");
}

#[test]
fn a_service_that_is_gone_is_said_to_be() {
    let Some((said, better)) = recovered_after(Cluster::kill_meta) else { return };
    let refused = "refused";
    assert!(said.to_lowercase().contains(refused) && said.contains("is not used"), "{said}");
    assert!(said.contains("can be started again") && said.contains(&better), "{said}");
}
