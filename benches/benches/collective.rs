//! What a collective call of MPI-IO costs when everybody asks for himself, and when one asks for all: a new file
//! that n clients open together, and its new length. The service is a process of its own, the clients are nodes
//! with one rank each.

use ebb_benches::nodes::crowd::{self, Introduction, Tally, each};
use ebb_benches::nodes::probe::make_file;
use ebb_benches::nodes::service::Service;
use ebb_benches::{Report, rounds};
use ebb_meta_client::{MetaClient, SetAttr, Wish};
use ebb_transport::Secure;
use ebb_types::{Errno, Ino, Name, Version};
use std::sync::Arc;
use std::time::{Duration, Instant};

const CLIENTS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
const LEASE: Duration = Duration::from_secs(10);
const LIMIT: Duration = Duration::from_secs(60);

/// All do the same at the same time; how long until the last one is done.
async fn together<F>(clients: &[MetaClient], work: impl Fn(MetaClient) -> F) -> Duration
where
    F: Future<Output = Result<(), Errno>> + Send + 'static,
{
    let (begun, tally) = (Instant::now(), Arc::new(Tally::default()));
    let all = clients.iter().cloned();
    each(all, clients.len().max(1), &tally, |_, client| {
        let work = work(client);
        async move { work.await.map_err(|e| e.to_string()) }
    })
    .await;
    assert_eq!(tally.error(), None);
    begun.elapsed()
}

async fn open(client: &MetaClient, ino: Ino) -> Result<(), Errno> {
    client.open(ino, true, false, Version::ZERO, Wish::No).await.map(drop)
}

/// As open(2) with O_CREAT of a name that is not known here.
async fn open_by_name(client: MetaClient, name: Name) -> Result<(), Errno> {
    match client.lookup(Ino::ROOT, &name).await {
        Ok(attr) => return open(&client, attr.ino).await,
        Err(Errno::ENOENT) => {}
        Err(e) => return Err(e),
    }
    match make_file(&client, &name, true).await {
        Ok(_) => Ok(()),
        Err(Errno::EEXIST) => {
            let attr = client.lookup(Ino::ROOT, &name).await?;
            open(&client, attr.ino).await
        }
        Err(e) => Err(e),
    }
}

/// One makes it, the others open it by what that one gives them.
async fn open_by_handle(clients: &[MetaClient], name: &Name) -> Duration {
    let begun = Instant::now();
    let (first, others) = clients.split_first().expect("at least one");
    let ino = make_file(first, name, true).await.expect("the file is made");
    together(others, |client| async move { open(&client, ino).await }).await;
    begun.elapsed()
}

async fn resize(client: MetaClient, ino: Ino, size: u64) -> Result<(), Errno> {
    let set = SetAttr { size: Some(size), ..SetAttr::default() };
    client.setattr(ino, &set).await.map(drop)
}

/// A create by all and by one, then a resize by all and by one.
async fn round(clients: &[MetaClient]) -> [Duration; 4] {
    let first = &clients[0];
    let name = Name::new(b"shared").expect("it is a name");
    let mut took = [Duration::ZERO; 4];
    for by_handle in [false, true] {
        took[usize::from(by_handle)] = match by_handle {
            true => open_by_handle(clients, &name).await,
            false => together(clients, |client| open_by_name(client, name.clone())).await,
        };
        let ino = first.lookup(Ino::ROOT, &name).await.expect("it is there").ino;
        let who = if by_handle { &clients[..1] } else { clients };
        took[2 + usize::from(by_handle)] =
            together(who, |client| resize(client, ino, 1 << 20)).await;
        together(clients, |client| async move { client.release(ino, false).await }).await;
        first.unlink(Ino::ROOT, &name).await.expect("unlink");
    }
    took
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let mut report = Report::new("collective");
    report.head("by all", "by one");
    for n in CLIENTS {
        let rows = runtime.block_on(async {
            let service = Service::start(Secure::Loopback, LEASE).await.expect("a service");
            let introduction = Introduction::to(&service, Secure::Loopback, LEASE, LIMIT);
            let tally = Arc::new(Tally::default());
            let clients = crowd::join(&introduction, n, n, &tally).await;
            assert_eq!(clients.len(), n, "{:?}", tally.error());
            round(&clients).await;
            let mut rows: [Vec<f64>; 4] = Default::default();
            for _ in 0..rounds() {
                for (row, took) in rows.iter_mut().zip(round(&clients).await) {
                    row.push(took.as_secs_f64().recip());
                }
            }
            rows
        });
        let [by_name, by_handle, all, one] = rows;
        report.add(format!("create and open together, {n} clients"), "calls/s", by_name, by_handle);
        report.add(format!("set_size together, {n} clients"), "calls/s", all, one);
    }
    println!("{}", report.save().expect("save").display());
}
