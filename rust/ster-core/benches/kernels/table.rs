//! The table at the end.

use ster_core::kernels::Isa;

use crate::runner::{Case, Data};
use crate::weights::Weights;

/// Every measurement of every ceiling, for each number of threads.
pub struct Peaks {
    /// GFLOP/s.
    pub fma: Vec<(Isa, [Vec<f64>; 2])>,
    /// GB/s.
    pub read: [Vec<f64>; 2],
}

impl Peaks {
    pub fn new(isas: &[Isa]) -> Peaks {
        Peaks { fma: isas.iter().map(|&isa| (isa, Default::default())).collect(), read: Default::default() }
    }

    pub fn fma(&self, isa: Isa, pool: usize) -> f64 {
        let (_, measured) = self.fma.iter().find(|(of, _)| *of == isa).expect("every instruction set was measured");
        highest(&measured[pool])
    }

    pub fn read(&self, pool: usize) -> f64 {
        highest(&self.read[pool])
    }
}

fn highest(measured: &[f64]) -> f64 {
    measured.iter().copied().fold(0.0, f64::max)
}

/// One case of one instruction set; a rate for each number of threads.
pub struct Line {
    pub isa: Isa,
    pub case: Case,
    pub rates: Vec<Rate>,
}

pub enum Rate {
    /// Seconds an iteration in the fastest sample and in the middle one, and what an iteration counts for.
    Measured {
        best: f64,
        median: f64,
        flops: f64,
        bytes: f64,
    },
    TooLong,
}

pub fn print(lines: &[Line], peaks: &Peaks, threads: &[usize], weights: &Weights) {
    println!("\npeaks, the best of each round before and after the kernels");
    let counts: String = threads.iter().map(|n| format!("{:>16}", plural(*n))).collect();
    println!("{:<28}{counts}", "");
    for (isa, measured) in &peaks.fma {
        println!("{:<28}{}", format!("FMA {}, GFLOP/s", isa.name()), rounds(&measured[..threads.len()]));
    }
    println!("{:<28}{}", format!("read {} MiB, GB/s", weights.bytes().len() >> 20), rounds(&peaks.read[..threads.len()]));

    let mut before = None;
    for line in lines {
        if before != Some(line.isa) {
            before = Some(line.isa);
            heading(line.isa, threads);
        }
        let case = &line.case;
        let data = if case.data == Data::Cold { "cold" } else { "warm" };
        let rates: String = (0..line.rates.len()).map(|n| cell(line, n, peaks)).collect();
        println!("{:<15}{:<24}{:>5} {data}{rates}", case.kernel, case.shape, case.rows);
    }
    let cache = weights.cache.map_or("of unknown size".into(), |bytes| format!("{} MiB", bytes >> 20));
    println!(
        "
Of the fastest sample; `median` is how many times as long the middle one took: far from 1, the machine was busy. cold: weights or keys
come from {} MiB walked through in order (last-level cache: {cache}); warm: as the iteration before left them. GFLOP/s and GB/s
are of what must be computed and read: each weight, key and value once, an exponential as one operation. share: the larger of GFLOP/s
over the FMA peak of the instruction set and, where cold, GB/s over the bandwidth; fma or mem says which. Norm, rotation and gate are
under neither ceiling.",
        weights.bytes().len() >> 20
    );
}

fn heading(isa: Isa, threads: &[usize]) {
    let columns: String = threads.iter().map(|n| format!(" | {:>44}", plural(*n))).collect();
    println!("\n{:<49}{columns}", isa.name());
    let columns = format!(" | {:>9} {:>6} {:>8} {:>7} {:>10}", "us", "median", "GFLOP/s", "GB/s", "share").repeat(threads.len());
    println!("{:<15}{:<24}{:>5} data{columns}", "kernel", "shape", "rows");
}

fn cell(line: &Line, pool: usize, peaks: &Peaks) -> String {
    let Rate::Measured { best, median, flops, bytes } = line.rates[pool] else { return format!(" | {:>44}", "takes too long") };
    let (gflops, gbytes) = (flops / best / 1e9, bytes / best / 1e9);
    let fma = 100.0 * gflops / peaks.fma(line.isa, pool);
    let memory = 100.0 * gbytes / peaks.read(pool);
    let share = match line.case.data {
        Data::Cold if memory > fma => format!("mem {memory:3.0} %"),
        Data::Cold | Data::Warm => format!("fma {fma:3.0} %"),
        Data::Rowwise => "-".into(),
    };
    format!(" | {:9.2} {:6.2} {gflops:8.1} {gbytes:7.1} {share:>10}", 1e6 * best, median / best)
}

fn rounds(measured: &[Vec<f64>]) -> String {
    measured.iter().map(|rounds| format!("{:>16}", rounds.iter().map(|v| format!("{v:.1}")).collect::<Vec<_>>().join(" "))).collect()
}

fn plural(threads: usize) -> String {
    if threads == 1 { "1 thread".into() } else { format!("{threads} threads") }
}
