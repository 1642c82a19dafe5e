//! One case on one thread and on all, through Criterion.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, SamplingMode};
use ster_core::kernels::Isa;
use ster_core::pool::Pool;

use crate::peaks;
use crate::table::{self, Line, Peaks, Rate};
use crate::weights::Weights;

/// Many and short: on a shared machine some of them are undisturbed.
pub const SAMPLES: usize = 20;
/// Of a case of which one iteration takes longer than a sample should.
const FEW_SAMPLES: usize = 10;
pub const MEASUREMENT: Duration = Duration::from_millis(60);

/// A case that would take longer than this for one iteration at its best is left out, and the table says so.
const LONGEST: f64 = 0.15;

/// What is measured, as the table calls it.
pub struct Case {
    pub kernel: String,
    pub shape: String,
    pub rows: usize,
    pub data: Data,
}

/// Where the larger operand lies when a kernel begins.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// In memory: each iteration goes on through a buffer larger than the last-level cache.
    Cold,
    /// In the cache that the iteration before left it in.
    Warm,
    /// Warm, and with so few operations a number that the FMA peak says nothing.
    Rowwise,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    One,
    OneAndAll,
}

/// One iteration: what it counts for, and how it is done.
pub struct Work<'a> {
    pub flops: f64,
    pub bytes: f64,
    /// Given a pool and room for results; gives the share of `flops` that it really did, for a last piece may be smaller.
    pub run: Run<'a>,
}

pub type Run<'a> = Box<dyn FnMut(&mut Pool, &mut [f32]) -> f64 + 'a>;

pub struct Runner {
    criterion: Criterion,
    pools: Vec<Pool>,
    peaks: Peaks,
    /// Room for the largest result.
    out: Vec<f32>,
    lines: Vec<Line>,
}

impl Runner {
    pub fn new(criterion: Criterion, isas: &[Isa], weights: &Weights) -> Runner {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = if cores == 1 { vec![1] } else { vec![1, cores] };
        let pools = threads.into_iter().map(Pool::new).collect();
        let out = vec![1.0; 512 * 49152];
        let mut runner = Runner { criterion, pools, peaks: Peaks::new(isas), out, lines: Vec::new() };
        runner.measure_peaks(weights);
        runner
    }

    /// Before and after the kernels; the higher counts.
    fn measure_peaks(&mut self, weights: &Weights) {
        for (n, pool) in self.pools.iter_mut().enumerate() {
            for (isa, fma) in &mut self.peaks.fma {
                fma[n].push(peaks::fma(*isa, pool));
            }
            // Whichever loads get most out of it.
            let read = Isa::available().into_iter().map(|isa| peaks::read(isa, weights.bytes(), pool)).fold(0.0, f64::max);
            self.peaks.read[n].push(read);
        }
    }

    /// `work` is made anew for each number of threads.
    pub fn case<'a>(&mut self, isa: Isa, case: Case, threads: Threads, mut work: impl FnMut(usize) -> Work<'a>) {
        let mut rates = Vec::new();
        let pools = if threads == Threads::One { 1 } else { self.pools.len() };
        for n in 0..pools {
            let count = self.pools[n].threads();
            let Work { flops, bytes, mut run } = work(count);
            let memory = if case.data == Data::Cold { bytes / self.peaks.read(n) } else { 0.0 };
            let at_best = (flops / self.peaks.fma(isa, n)).max(memory) / 1e9;
            if at_best > LONGEST {
                rates.push(Rate::TooLong);
                continue;
            }
            let (pool, out) = (&mut self.pools[n], &mut self.out[..]);
            let mut samples = Vec::new();
            let mut group = self.criterion.benchmark_group(format!("{}/{}", isa.name(), case.kernel));
            group.sampling_mode(SamplingMode::Flat);
            let wanted = if at_best * SAMPLES as f64 > MEASUREMENT.as_secs_f64() { FEW_SAMPLES } else { SAMPLES };
            group.sample_size(wanted);
            group.measurement_time(MEASUREMENT.max(Duration::from_secs_f64(at_best * 2.0 * wanted as f64)));
            group.bench_function(format!("{}/r{}/t{count}", case.shape, case.rows), |bencher| {
                bencher.iter_custom(|iterations| {
                    let mut done = 0.0;
                    let start = Instant::now();
                    for _ in 0..iterations {
                        done += run(pool, out);
                        black_box(&mut *out);
                    }
                    let each = start.elapsed().as_secs_f64() / done;
                    samples.push(each);
                    Duration::from_secs_f64(each * iterations as f64)
                });
            });
            group.finish();
            // The last ones; Criterion's warm-up came before. None at all where a filter leaves the case out.
            if let Some(first) = samples.len().checked_sub(wanted) {
                let samples = &mut samples[first..];
                samples.sort_by(f64::total_cmp);
                rates.push(Rate::Measured { best: samples[0], median: samples[wanted / 2], flops, bytes });
            }
        }
        if rates.iter().any(|rate| matches!(rate, Rate::Measured { .. })) {
            self.lines.push(Line { isa, case, rates });
        }
    }

    pub fn finish(mut self, weights: &Weights) {
        self.measure_peaks(weights);
        let threads: Vec<usize> = self.pools.iter().map(Pool::threads).collect();
        table::print(&self.lines, &self.peaks, &threads, weights);
        self.criterion.final_summary();
    }
}
