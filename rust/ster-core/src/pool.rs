//! Threads that are started once and share rows and columns, never a sum.
//!
//! A pass is a few hundred short regions; between two of them a worker spins for a moment before it sleeps, so that the next region
//! starts within a microsecond. The thread that calls works too. A worker that wakes late finds the region closed and is not waited for.
//!
//! Each thread begins in a stretch of grains of its own, so that it reads the weights of neighbouring columns in one stream, and then
//! helps the others out.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker looks for work before it sleeps: longer than the pause between two steps of decoding.
const SPIN: Duration = Duration::from_micros(200);
/// How often the calling thread asks whether to stop.
const POLL: Duration = Duration::from_millis(20);

pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    /// Counts regions; a worker that sees a new number tries the gate.
    region: AtomicUsize,
    /// 1 while a region is open, plus 2 for each worker inside.
    gate: AtomicUsize,
    /// Of each thread's stretch, the next grain to take.
    next: Vec<Line<AtomicUsize>>,
    /// Written by the caller while the gate is shut and nobody is inside.
    job: std::cell::UnsafeCell<Option<Job>>,
    panicked: AtomicBool,
    stop: AtomicBool,
    asleep: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

/// In a cache line of its own.
#[repr(align(64))]
struct Line<T>(T);

// SAFETY: `job` is written only while the gate is shut and empty, and read only by workers inside the gate.
unsafe impl Sync for Shared {}
// SAFETY: as above; the job's closure is `Sync` and outlives the region (see `Pool::run`).
unsafe impl Send for Shared {}

#[derive(Clone, Copy)]
struct Job {
    grains: usize,
    work: *const (dyn Fn(usize) + Sync),
}

impl Shared {
    /// Where the stretch of `thread` begins, of `grains` in all.
    fn start(&self, thread: usize, grains: usize) -> usize {
        thread * grains / self.next.len()
    }

    /// Take grain after grain, those of `me` first, until there are none.
    fn take(&self, me: usize, grains: usize, mut work: impl FnMut(usize)) {
        let threads = self.next.len();
        for whose in (me..threads).chain(0..me) {
            let end = self.start(whose + 1, grains);
            loop {
                let grain = self.next[whose].0.fetch_add(1, Relaxed);
                if grain >= end {
                    break;
                }
                work(grain);
            }
        }
    }
}

/// Asked now and then by the calling thread; true stops the pass.
pub type Interrupt<'a> = &'a dyn Fn() -> bool;

impl Pool {
    /// `threads` in all, the caller's included.
    pub fn new(threads: usize) -> Pool {
        let shared = Arc::new(Shared {
            region: AtomicUsize::new(0),
            gate: AtomicUsize::new(0),
            next: (0..threads.max(1)).map(|_| Line(AtomicUsize::new(0))).collect(),
            job: std::cell::UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            asleep: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        let workers = (1..threads.max(1))
            .filter_map(|n| {
                let shared = Arc::clone(&shared);
                // A thread that the system refuses is one thread fewer, not another result.
                std::thread::Builder::new().name(format!("ster-{n}")).spawn(move || worker(&shared, n)).ok()
            })
            .collect();
        Pool { shared, workers }
    }

    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Run `work(0)` to `work(grains - 1)`, in any order, on all threads. False: `interrupt` said stop; it is not asked again,
    /// so the caller must stop even if the last grain was through by then.
    ///
    /// Takes `&mut self`: one region at a time.
    pub fn run(&mut self, grains: usize, interrupt: Interrupt<'_>, work: &(dyn Fn(usize) + Sync)) -> bool {
        let mut asked = Instant::now();
        let mut stopped = false;
        if self.workers.is_empty() || grains <= 1 {
            for grain in 0..grains {
                work(grain);
                if asked.elapsed() > POLL {
                    asked = Instant::now();
                    if interrupt() {
                        return false;
                    }
                }
            }
            return true;
        }

        let shared = &*self.shared;
        debug_assert_eq!(shared.gate.load(SeqCst), 0);
        // SAFETY: the gate is shut and empty, so no worker reads `job`. The lifetime is erased, and `Region` waits for every worker
        // inside before this function returns or unwinds, so the closure outlives its use.
        unsafe {
            let work = std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(work);
            *shared.job.get() = Some(Job { grains, work });
        }
        // A region that unwound in the caller may have left it set.
        shared.panicked.store(false, SeqCst);
        for (thread, next) in shared.next.iter().enumerate() {
            next.0.store(shared.start(thread, grains), SeqCst);
        }
        shared.gate.store(1, SeqCst);
        shared.region.fetch_add(1, SeqCst);
        if shared.asleep.load(SeqCst) > 0 {
            let _guard = shared.lock.lock();
            shared.wake.notify_all();
        }
        let region = Region { shared };
        shared.take(0, grains, |grain| {
            work(grain);
            if asked.elapsed() > POLL {
                asked = Instant::now();
                if interrupt() {
                    // Grains not yet taken are dropped. Far from overflow: each thread adds one once more to each and leaves.
                    shared.next.iter().for_each(|next| next.0.store(usize::MAX / 2, Relaxed));
                    stopped = true;
                }
            }
        });
        drop(region);
        if shared.panicked.load(SeqCst) {
            panic!("a worker thread panicked");
        }
        !stopped
    }
}

/// An open region: shut, and left by everyone, when dropped.
struct Region<'a> {
    shared: &'a Shared,
}

impl Drop for Region<'_> {
    fn drop(&mut self) {
        self.shared.gate.fetch_sub(1, SeqCst);
        let mut spins = 0u32;
        while self.shared.gate.load(Acquire) != 0 {
            spins += 1;
            if spins.is_multiple_of(1024) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.region.fetch_add(1, SeqCst);
        {
            let _guard = self.shared.lock.lock();
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn worker(shared: &Shared, me: usize) {
    let _floats = DefaultFloats::set();
    let mut seen = 0;
    loop {
        seen = wait(shared, seen);
        if shared.stop.load(SeqCst) {
            return;
        }
        let entered = shared.gate.fetch_update(SeqCst, SeqCst, |gate| (gate & 1 == 1).then_some(gate + 2));
        if entered.is_err() {
            continue;
        }
        // SAFETY: inside the gate `job` is not written, and its closure is alive until this worker leaves.
        let (grains, work) = unsafe {
            let job = (*shared.job.get()).expect("an open region has a job");
            (job.grains, &*job.work)
        };
        let result = catch_unwind(AssertUnwindSafe(|| shared.take(me, grains, work)));
        if result.is_err() {
            shared.panicked.store(true, SeqCst);
        }
        shared.gate.fetch_sub(2, SeqCst);
    }
}

/// Until the region's number is not `seen`: spin, then sleep.
fn wait(shared: &Shared, seen: usize) -> usize {
    let start = Instant::now();
    let mut spins = 0u32;
    loop {
        let region = shared.region.load(Acquire);
        if region != seen {
            return region;
        }
        std::hint::spin_loop();
        spins += 1;
        if spins.is_multiple_of(64) && start.elapsed() > SPIN {
            break;
        }
    }
    let mut guard = shared.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    shared.asleep.fetch_add(1, SeqCst);
    loop {
        let region = shared.region.load(SeqCst);
        if region != seen {
            shared.asleep.fetch_sub(1, SeqCst);
            return region;
        }
        guard = shared.wake.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner());
    }
}

/// Round to nearest, subnormals kept, while this lives; then as it was. Libraries built with fast-math switch subnormals off for the
/// thread that loads them, and threads inherit that.
pub struct DefaultFloats {
    #[cfg(target_arch = "x86_64")]
    before: u32,
    #[cfg(target_arch = "aarch64")]
    before: u64,
}

impl DefaultFloats {
    #[cfg(target_arch = "x86_64")]
    pub fn set() -> Self {
        let mut before = 0u32;
        let default = 0x1F80u32; // all exceptions masked, nothing else
        // SAFETY: reads and writes the floating-point control register only, through valid pointers.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &mut before, options(nostack));
            std::arch::asm!("ldmxcsr [{}]", in(reg) &default, options(nostack));
        }
        DefaultFloats { before }
    }

    #[cfg(target_arch = "aarch64")]
    pub fn set() -> Self {
        let before: u64;
        // SAFETY: reads and writes the floating-point control register only.
        unsafe {
            std::arch::asm!("mrs {}, fpcr", out(reg) before, options(nomem, nostack));
            std::arch::asm!("msr fpcr, {}", in(reg) 0u64, options(nomem, nostack));
        }
        DefaultFloats { before }
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub fn set() -> Self {
        DefaultFloats {}
    }
}

impl Drop for DefaultFloats {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: puts back what `set` read.
        unsafe {
            std::arch::asm!("ldmxcsr [{}]", in(reg) &self.before, options(nostack));
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: puts back what `set` read.
        unsafe {
            std::arch::asm!("msr fpcr, {}", in(reg) self.before, options(nomem, nostack));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_grain_runs_once() {
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(threads);
            for grains in [0, 1, 2, 3, 17, 1000] {
                for _ in 0..50 {
                    let counts: Vec<AtomicUsize> = (0..grains).map(|_| AtomicUsize::new(0)).collect();
                    assert!(pool.run(grains, &|| false, &|n| {
                        counts[n].fetch_add(1, SeqCst);
                    }));
                    assert!(counts.iter().all(|n| n.load(SeqCst) == 1));
                }
            }
        }
    }

    #[test]
    fn an_interrupt_drops_what_is_left() {
        for threads in [1, 3] {
            let ran = AtomicUsize::new(0);
            let finished = Pool::new(threads).run(10_000, &|| true, &|_| {
                ran.fetch_add(1, SeqCst);
                std::thread::sleep(Duration::from_millis(1));
            });
            assert!(!finished && ran.load(SeqCst) < 1_000, "{finished} {ran:?}");
        }
    }

    #[test]
    fn an_interrupt_during_the_last_grain_is_not_lost() {
        for threads in [1, 2] {
            let finished = Pool::new(threads).run(2, &|| true, &|_| std::thread::sleep(2 * POLL));
            assert!(!finished);
        }
    }

    #[test]
    fn a_panic_in_a_worker_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = Pool::new(2);
        let result = catch_unwind(AssertUnwindSafe(|| pool.run(64, &|| false, &|_| panic!("grain"))));
        assert!(result.is_err());
        assert!(pool.run(8, &|| false, &|_| {}));
    }

    #[test]
    fn flush_to_zero_is_off_inside_and_restored_after() {
        #[cfg(target_arch = "x86_64")]
        {
            fn mxcsr() -> u32 {
                let mut now = 0u32;
                // SAFETY: reads the register into a valid place.
                unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut now, options(nostack)) };
                now
            }
            let flush = 0x9FC0u32;
            // SAFETY: sets flush-to-zero and denormals-are-zero for this thread, put back below.
            unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &flush, options(nostack)) };
            {
                let _floats = DefaultFloats::set();
                assert_eq!(mxcsr() & 0x8040, 0);
            }
            assert_eq!(mxcsr() & 0x8040, 0x8040);
            let default = 0x1F80u32;
            // SAFETY: as above.
            unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &default, options(nostack)) };
        }
    }
}
