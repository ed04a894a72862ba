//! A KV cache in one process, used by others: a broker hands out its pages by name.
//!
//! Each client gets the pages that it asks for and is put on their trust lists; a client that is
//! stuck keeps no other waiting. Clients that run the vendor's stack ask in text and import the
//! 64-bit handle: docs/hosts.md has such a client.
//!
//! Without an NPU: `cargo xtask emulate -- cargo run --quiet --example kv_cache_broker`

use ascend_vmm::pool::{CacheOptions, PageCache};
use ascend_vmm::share::{self, Broker, BrokerOptions, Request};
use ascend_vmm::{LogicalId, Session};
use std::error::Error;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::time::Duration;

const PAGE: u64 = 2 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    match &std::env::args().collect::<Vec<_>>()[..] {
        [_, socket, name] => client(socket, name),
        _ => broker(),
    }
}

fn broker() -> Result<(), Box<dyn Error>> {
    let session = Session::open()?;
    let device = session.device(LogicalId(0))?;
    // All pages are for the same clients, so they are used again with their exports.
    let pages = PageCache::with(&device, CacheOptions::default().reuse_exported(true));
    let prefixes = ["system-prompt", "document"].map(|name| (name, [pages.take(PAGE), pages.take(PAGE)]));
    let mut served = Vec::new();
    for (name, [first, second]) in prefixes {
        let (first, second) = (first?, second?);
        session.reserve(PAGE)?.map(0, &first)?.write(0, name.as_bytes())?;
        served.push((name, vec![first, second]));
    }
    let answer = move |request: &Request| match served.iter().find(|(name, _)| *name == request.name) {
        Some((_, pages)) => Ok(pages.clone()),
        None => Err(format!("no prefix {} is cached", request.name)),
    };

    let path = std::env::temp_dir().join(format!("ascend-vmm-broker-{}", std::process::id()));
    let broker = Broker::start(&session, UnixListener::bind(&path)?, BrokerOptions::default(), answer)?;
    let clients = ["document", "system-prompt", "nothing"]
        .map(|name| Command::new(std::env::current_exe().unwrap_or_default()).arg(&path).arg(name).status());
    drop(broker);
    std::fs::remove_file(&path)?;
    for status in clients {
        println!("a client ended with {}", status?);
    }
    Ok(())
}

fn client(socket: &str, name: &str) -> Result<(), Box<dyn Error>> {
    let session = Session::open()?;
    let device = session.device(LogicalId(0))?;
    match share::request(&UnixStream::connect(socket)?, name, &device, Duration::from_secs(30)) {
        Ok(pages) => {
            let addresses = session.reserve(PAGE * pages.len() as u64)?;
            let mapped = pages.iter().zip(0..).map(|(page, number)| addresses.map(number * PAGE, page));
            let mapped = mapped.collect::<Result<Vec<_>, _>>()?;
            let mut text = vec![0; name.len()];
            mapped[0].read(0, &mut text)?;
            println!("{} pages, beginning with {:?}", pages.len(), String::from_utf8_lossy(&text));
        }
        Err(error) => println!("{error}"),
    }
    Ok(())
}
