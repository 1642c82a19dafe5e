//! What the machine can do: multiply-adds in registers, bytes from memory. The best of several runs, for a ceiling is not an average.

use std::hint::black_box;
use std::time::Instant;

use ster_core::kernels::Isa;
use ster_core::pool::Pool;

const RUNS: usize = 30;

/// Multiply-adds of one instruction set, in GFLOP/s.
pub fn fma(isa: Isa, pool: &mut Pool) -> f64 {
    let chains = match isa.name() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` is only made for instruction sets that were detected.
        "avx512" => (|rounds| unsafe { x86::avx512(rounds) }) as fn(u32) -> f64,
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        "avx2" => |rounds| unsafe { x86::avx2(rounds) },
        #[cfg(target_arch = "aarch64")]
        "neon" => neon,
        _ => portable,
    };
    // Rounds that take about half a millisecond, so that threads share a few of them evenly.
    let mut rounds = 256;
    loop {
        let start = Instant::now();
        chains(rounds);
        if start.elapsed().as_micros() > 300 {
            break;
        }
        rounds *= 2;
    }
    let grains = 6 * pool.threads();
    let flops = chains(rounds) * grains as f64;
    best(|| {
        pool.run(grains, &|| false, &|_| {
            black_box(chains(black_box(rounds)));
        });
        flops
    })
}

/// Reading `bytes`, which no cache holds, in GB/s.
pub fn read(isa: Isa, bytes: &[u8], pool: &mut Pool) -> f64 {
    // Long enough for the prefetcher to run, short enough to share evenly.
    const GRAIN: usize = 1 << 20;
    let sum = match isa.name() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` is only made for instruction sets that were detected.
        "avx512" => (|bytes: &[u8]| unsafe { x86::read_avx512(bytes) }) as fn(&[u8]) -> u64,
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        "avx2" => |bytes: &[u8]| unsafe { x86::read_avx2(bytes) },
        _ => read_portable,
    };
    // A few milliseconds a run, the next run going on behind it.
    const GRAINS: usize = 64;
    let mut parts = bytes.chunks_exact(GRAINS * GRAIN).cycle();
    best(|| {
        let part = parts.next().expect("a buffer of several parts");
        pool.run(GRAINS, &|| false, &|n| {
            black_box(sum(&part[n * GRAIN..(n + 1) * GRAIN]));
        });
        part.len() as f64
    })
}

/// Billions a second of what `run` says it did, at best.
fn best(mut run: impl FnMut() -> f64) -> f64 {
    (0..RUNS)
        .map(|_| {
            let start = Instant::now();
            let done = run();
            done / start.elapsed().as_secs_f64() / 1e9
        })
        .fold(0.0, f64::max)
}

/// `s = s * a + b` in independent chains, more than latency times width of any processor asks for. `s` stays near 1.
macro_rules! chains {
    ($rounds:ident, $lanes:literal, $chains:literal, $splat:expr, $fma:expr) => {{
        let (a, b) = ($splat(black_box(0.999)), $splat(black_box(0.001)));
        let mut sums = [$splat(black_box(1.0)); $chains];
        for _ in 0..$rounds {
            for sum in &mut sums {
                *sum = $fma(*sum, a, b);
            }
        }
        black_box(sums);
        f64::from($rounds) * ($chains * $lanes * 2) as f64
    }};
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    #[target_feature(enable = "avx512f")]
    pub fn avx512(rounds: u32) -> f64 {
        chains!(rounds, 16, 24, _mm512_set1_ps, _mm512_fmadd_ps)
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn avx2(rounds: u32) -> f64 {
        chains!(rounds, 8, 12, _mm256_set1_ps, _mm256_fmadd_ps)
    }

    #[target_feature(enable = "avx512f")]
    pub fn read_avx512(bytes: &[u8]) -> u64 {
        let mut sums = [_mm512_setzero_si512(); 8];
        for part in bytes.chunks_exact(size_of_val(&sums)) {
            for (n, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `part` holds as many bytes as `sums`.
                *sum = _mm512_add_epi64(*sum, unsafe { _mm512_loadu_si512(part.as_ptr().add(64 * n).cast()) });
            }
        }
        _mm512_reduce_add_epi64(sums.into_iter().fold(_mm512_setzero_si512(), |a, b| _mm512_add_epi64(a, b))) as u64
    }

    #[target_feature(enable = "avx2")]
    pub fn read_avx2(bytes: &[u8]) -> u64 {
        let mut sums = [_mm256_setzero_si256(); 8];
        for part in bytes.chunks_exact(size_of_val(&sums)) {
            for (n, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `part` holds as many bytes as `sums`.
                *sum = _mm256_add_epi64(*sum, unsafe { _mm256_loadu_si256(part.as_ptr().add(32 * n).cast()) });
            }
        }
        let sum = sums.into_iter().fold(_mm256_setzero_si256(), |a, b| _mm256_add_epi64(a, b));
        _mm256_extract_epi64::<0>(sum) as u64
    }
}

#[cfg(target_arch = "aarch64")]
fn neon(rounds: u32) -> f64 {
    use std::arch::aarch64::*;
    // SAFETY: every aarch64 processor that Rust's targets name has NEON.
    unsafe { chains!(rounds, 4, 24, |v| vdupq_n_f32(v), |sum, a, b| vfmaq_f32(b, sum, a)) }
}

/// What the portable kernels can hope for: without an FMA instruction to compile to, `mul_add` is a call.
fn portable(rounds: u32) -> f64 {
    chains!(rounds, 1, 16, std::convert::identity::<f32>, f32::mul_add)
}

fn read_portable(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 8];
    for part in bytes.chunks_exact(size_of_val(&sums)) {
        for (sum, word) in sums.iter_mut().zip(part.as_chunks().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}
