//! An engine that finds its weights in the service, or writes them there:
//! `engine SOCKET DOMAIN`.

use ascend_vmm::{LogicalId, Session};
use ascend_vmm_service::{Client, DomainName, OpenOptions, Opened};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(socket), Some(domain)) = (arguments.next(), arguments.next()) else {
        return Err("usage: engine SOCKET DOMAIN".into());
    };
    let domain: DomainName = domain.parse()?;
    let device = Session::open()?.device(LogicalId(0))?;
    let client = Client::new(socket);
    let reader = match client.write_or_read(&device, &domain, 64 << 20, &OpenOptions::new())? {
        Opened::Reader(reader) => {
            println!("found version {} of {domain}: {} tensors", reader.version(), reader.entries().len());
            reader
        }
        Opened::Writer(mut writer) => {
            for layer in 0..4u8 {
                // Weights would come from a file here.
                let weights = vec![layer; 1 << 20];
                writer.put(&format!("layer.{layer}"), weights.len() as u64, b"u8 1048576")?.write(&weights)?;
            }
            let reader = writer.commit()?;
            println!("wrote version {} of {domain}", reader.version());
            reader
        }
    };
    for (key, entry) in reader.entries() {
        let mut first = [0];
        reader.get(key)?.part(0, 1)?.read(&mut first)?;
        println!("{key}: {} bytes, {}, the first is {}", entry.size, String::from_utf8_lossy(&entry.value), first[0]);
    }
    Ok(())
}
