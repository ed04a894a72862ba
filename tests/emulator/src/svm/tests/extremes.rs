//! Extreme and random numbers in arguments: the model answers every call.

use super::*;
use crate::rig::Random;
use ascend_ioctl::svm::Advice;

/// Numbers at which arithmetic goes wrong, and those that mean something to these sessions.
const NUMBERS: [u64; 24] = [
    0,
    1,
    2,
    3,
    7,
    65,
    4095,
    4096,
    2 * MIB,
    2 * MIB + 1,
    GIB,
    1 << 40,
    u32::MAX as u64,
    1 << 32,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 4095,
    u64::MAX - 1,
    u64::MAX,
    BUFFER,
    BUFFER + 4096,
    VA,
    DEVICE,
    MANAGED,
];

/// Heaps of plain memory.
const DEVICE: u64 = VA + 256 * GIB;
const MANAGED: u64 = VA + 512 * GIB;

fn pick(random: &mut Random) -> u64 {
    let chosen = random.of(&NUMBERS);
    // Small numbers fill single words too.
    if random.next() % 4 == 0 { chosen & 0xffff_ffff | random.of(&NUMBERS[..8]) << 32 } else { chosen }
}

fn session_with_memory(bench: &mut Bench) -> TestClient {
    let client = bench.session(10);
    bench.mapped(&client, 0, VA, 2 * MIB);
    for (at, sub_kind) in [(DEVICE, svm::SUB_DEVICE), (MANAGED, svm::SUB_SVM)] {
        let index = ((at - svm::SVM_START) / GIB) as u32;
        let heap = svm::UpdateHeap { operation: svm::HEAP_ENABLE, kind: svm::HEAP_HUGE, sub_kind, index, size: GIB };
        bench.call(&client, Op::UpdateHeap, 0, heap).unwrap();
        bench.alloc(&client, at, 2 * MIB).unwrap();
    }
    let advice = (Advice::HUGE | Advice::POPULATE | Advice::LOCK_DEVICE).bits();
    let populate = svm::Advise { address: DEVICE, size: 2 * MIB, advice, ..Default::default() };
    bench.call(&client, Op::Advise, 0, populate).unwrap();
    client
}

#[test]
fn any_numbers_in_any_argument_are_answered() {
    const OPS: [Op; 24] = [
        Op::ConvertAddr,
        Op::ConvertAddr,
        Op::ConvertAddr,
        Op::DestroyAddr,
        Op::DestroyAddrBatch,
        Op::SubmitConvertCopy,
        Op::WaitConvertCopy,
        Op::MemRemoteMap,
        Op::MemRemoteMap,
        Op::MemRemoteUnmap,
        Op::RegisterDma,
        Op::UnregisterDma,
        Op::Translate,
        Op::Advise,
        Op::Prefetch,
        Op::Memcpy,
        Op::Memcpy2d,
        Op::MemcpyBatch,
        Op::AsyncMemcpy,
        Op::Memset8,
        Op::IpcMemCreate,
        Op::IpcMemSetPid,
        Op::IpcMemSetPidPod,
        Op::CheckMemInfo,
    ];
    let mut random = Random::new(0);
    let mut granted = 0;
    for _ in 0..20 {
        let mut bench = Bench::new();
        let client = session_with_memory(&mut bench);
        for _ in 0..1000 {
            let op = OPS[random.next() as usize % OPS.len()];
            let command = bench.machine.config.generation.svm(op).unwrap();
            let mut arg = Arg::new(0, &svm::Alloc::default());
            for word in arg.data.as_mut_bytes().chunks_exact_mut(8) {
                word.copy_from_slice(&pick(&mut random).to_le_bytes());
            }
            let outcome = bench.raw(&client, command.command.request(), &mut arg);
            granted += u32::from(matches!(outcome, Outcome::Done(Ok(_))));
        }
        bench.exit(&client);
    }
    assert!(granted > 100, "only {granted} calls were granted: the numbers mean nothing");
}
