//! Random clients: after any sequence of commands the module's counters agree, and nothing is left
//! when the clients are gone.

use super::super::handle::HandleKind;
use super::*;
use crate::rig::Random;
use std::collections::HashMap;

impl Bench {
    /// Checks that counters which are kept in two places agree.
    fn assert_balanced(&self, step: &str) {
        let mut blocks: HashMap<store::BlockId, u32> = HashMap::new();
        for process in self.svm.processes.values() {
            let devices = process.agents.iter().map(|(&device, agent)| (device, &agent.handles));
            for (device, table) in devices.chain([(HOST, &process.host)]) {
                for (id, handle) in table.iter() {
                    if handle.kind == HandleKind::Normal {
                        assert!(blocks.insert(handle.block, device).is_none(), "{step}: a block with two owners");
                    } else {
                        assert!(process.nodes.contains_key(&(device, id)), "{step}: a shared handle without node");
                    }
                    let side = if device == HOST { svm::SIDE_HOST } else { svm::SIDE_DEVICE };
                    let mapped = process.heaps.values().flat_map(|heap| heap.mappings.values());
                    let mapped = mapped.filter(|it| it.side == side && it.physical == device && it.id == id).count();
                    assert_eq!(handle.mapped as usize, mapped, "{step}: mappings of handle {id} of {device}");
                }
            }
            for heap in process.heaps.values() {
                let mut end = heap.start;
                for mapping in heap.mappings.values() {
                    assert!(mapping.start >= end && mapping.end() <= heap.end(), "{step}: mappings overlap");
                    end = mapping.end();
                    assert!(heap.reservation(mapping.start).is_some_and(|it| it.counter > 1), "{step}: not counted");
                }
                let mut end = heap.start;
                for reservation in heap.reservations.values() {
                    assert!(reservation.start >= end && reservation.counter >= 1, "{step}: reservations overlap");
                    end = reservation.start + reservation.size;
                }
            }
        }
        for (&(device, _), share) in self.svm.world.shares.iter() {
            let nodes = self.svm.processes.values().flat_map(|process| process.nodes.values());
            let holders = nodes.filter(|node| node.physical == device).count();
            assert!(share.holders > 0 && share.holders as usize <= holders, "{step}: holders");
            assert!(blocks.insert(share.block, device).is_none(), "{step}: a shared block with another owner");
        }
        let mut used: HashMap<u32, u64> = HashMap::new();
        for (block, pool) in blocks {
            *used.entry(pool).or_default() += self.svm.world.store.length(block).expect("an owned block exists");
        }
        for pool in [0, 1, HOST] {
            assert_eq!(self.svm.used(pool), used.get(&pool).copied().unwrap_or(0), "{step}: bytes of {pool}");
        }
    }

    /// Runs one command with arguments that are sometimes valid.
    fn anything(&mut self, random: &mut Random, client: &TestClient, tgids: &[i32]) -> String {
        let device = random.of(&[0, 0, 0, 1, 1, HOST, HOST, 2]);
        let id = random.below(10) as i32;
        let size = 2 * MIB * (random.below(4) + u64::from(random.below(20) != 0));
        let address = VA + 2 * MIB * random.below(12) + random.of(&[0, 0, 0, 0, 0, 4096]);
        let pages = random.below(5);
        let share = random.below(10) as i32;
        let (what, result) = match random.below(22) {
            0 | 1 => ("create", self.create(client, device, size).map(drop)),
            2 | 3 => ("alloc", self.alloc(client, address, size)),
            4..=7 => {
                // The page count must be the handle's; pass the right one in most cases.
                let process = self.svm.processes.values().find(|it| it.tgid == client.tgid);
                let table = process.and_then(|process| match device {
                    HOST => Some(&process.host),
                    _ => process.agents.get(&device).map(|agent| &agent.handles),
                });
                let real = table.and_then(|table| table.get(id)).map_or(pages, |handle| handle.pages);
                let pages = if random.below(8) == 0 { pages } else { real };
                ("map", self.map(client, device, id, address, size, pages))
            }
            8 | 9 => ("unmap", self.unmap(client, address).map(drop)),
            10 => ("free", self.free(client, address)),
            11 => ("release", self.release(client, device, id, pages).map(drop)),
            12 => ("export", self.export(client, device, id).map(drop)),
            13 => ("trust", self.trust(client, device, share, random.of(tgids))),
            14 => ("import", self.import(client, device, random.of(&[0, 1, HOST]), share).map(drop)),
            15 => ("access", self.access(client, address, size, random.of(&[0, 1, HOST]), random.of(&[1, 3]))),
            16 => ("copy in", self.copy(client, address, BUFFER, size).map(drop)),
            17 => ("copy", self.copy(client, address, VA + 2 * MIB * random.below(12), size).map(drop)),
            18 => {
                let para = svm::AsyncMemcpy { destination: address, source: BUFFER, size, ..Default::default() };
                ("async", self.call(client, Op::AsyncMemcpy, 0, para).map(drop))
            }
            19 => {
                let para = svm::AsyncMemcpy { task: random.below(6) as i32, ..Default::default() };
                ("refresh", self.call(client, Op::MemcpyResultRefresh, 0, para).map(drop))
            }
            20 => {
                let para = svm::Memset { destination: address, value: 7, size, ..Default::default() };
                ("fill", self.call(client, Op::Memset8, 0, para).map(drop))
            }
            _ => match random.below(12) {
                0 => ("close device", self.call(client, Op::CloseDevice, device, svm::Alloc::default()).map(drop)),
                1 if random.below(3) == 0 => {
                    ("disable", self.heap(client, svm::HEAP_DISABLE, svm::HEAP_HUGE, INDEX, GIB))
                }
                1..=5 => ("enable", self.enable(client, INDEX, svm::HEAP_HUGE)),
                _ => ("setup", self.setup(client, device).map(drop)),
            },
        };
        format!("{what} device {device} id {id} at {address:#x} size {size:#x}: {result:?}")
    }
}

#[test]
fn counters_agree_after_any_sequence_of_commands() {
    let mut done: HashMap<String, u32> = HashMap::new();
    for seed in 1..=6 {
        let mut random = Random::new(seed);
        let mut bench = Bench::with(|config| {
            config.hbm = 64 * MIB;
            config.host_memory = 64 * MIB;
            config.generation = Generation::ALL[seed as usize % 3];
        });
        let mut clients: Vec<TestClient> = [10, 11].map(|tgid| bench.session(tgid)).to_vec();
        for step in 0..3000 {
            let index = random.below(2) as usize;
            if random.below(400) == 0 {
                bench.exit(&clients[index]);
                clients[index] = bench.session(10 + index as i32);
            }
            let what = bench.anything(&mut random, &clients[index].clone(), &[10, 11]);
            let mut words = what.split(" device ");
            if let Some(name) = words.next().filter(|_| what.ends_with("Ok(())")) {
                *done.entry(name.to_owned()).or_default() += 1;
            }
            bench.assert_balanced(&format!("seed {seed}, step {step}, {what}"));
            // Freeing a reservation under a mapping that spans two of them is a trap, which does
            // not matter here.
            bench.machine.traps.clear();
        }
        for client in clients {
            bench.exit(&client);
        }
        assert!(bench.svm.state().is_empty(), "seed {seed}: {:?}", bench.svm.state());
    }
    // The test is only meaningful if each command has succeeded at least once.
    for name in [
        "create", "alloc", "map", "unmap", "free", "release", "export", "import", "access", "copy in", "copy", "async",
        "refresh", "fill",
    ] {
        assert!(done.contains_key(name), "no {name} succeeded: {done:?}");
    }
}

#[test]
fn no_argument_makes_the_module_panic() {
    const WORDS: [u64; 18] = [
        0,
        1,
        2,
        4096,
        2 * MIB,
        GIB,
        VA,
        VA + 2 * MIB,
        VA + GIB - 1,
        BUFFER,
        svm::SVM_START,
        svm::SOMA_START,
        svm::DYNAMIC_START,
        26 << 40,
        u32::MAX as u64,
        i64::MAX as u64,
        u64::MAX - 4095,
        u64::MAX,
    ];
    for generation in Generation::ALL {
        let mut random = Random::new(3);
        let mut bench = Bench::with(|config| config.generation = generation);
        let mut client = bench.session(10);
        bench.mapped(&client, 0, VA, 4 * MIB);
        for _ in 0..20_000 {
            let mut arg = Arg::new_zeroed();
            arg.head.device = random.of(&[0, 0, 0, 1, 2, 64, HOST, HOST, 66, 1123, 1124, u32::MAX]);
            for word in &mut arg.data[..9] {
                let (low, high) = (random.of(&WORDS), random.of(&WORDS));
                *word = if random.below(3) == 0 { low & 0xFFFF_FFFF | high << 32 } else { low };
            }
            let request = 0xC158_4D00 | random.below(256) as u32;
            bench.raw(&client, request, &mut arg);
            if random.below(50) == 0 {
                let kind = random.of(&[
                    ChangeKind::Unmap,
                    ChangeKind::Protect(1),
                    ChangeKind::Advise(libc::MADV_RANDOM),
                    ChangeKind::Bind(0),
                    ChangeKind::Remap { length: 0, fixed: false },
                ]);
                let (start, length) = (random.of(&WORDS), random.of(&WORDS));
                let _ = bench.change(&client, kind, start..start.saturating_add(length));
                let _ = bench.mmap(&client, random.of(&WORDS), random.of(&WORDS));
            }
            bench.machine.traps.clear();
            if bench.svm.state().sessions.iter().all(|session| !session.is_session) {
                bench.exit(&client);
                client = bench.session(10);
            }
        }
        bench.exit(&client);
        assert!(bench.svm.state().is_empty(), "{generation}: {:?}", bench.svm.state());
    }
}
