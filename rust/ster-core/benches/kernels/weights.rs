//! Numbers to multiply, in a mapped file as those of a checkpoint are, and far more than the last-level cache holds.

use std::io::Write;

use memmap2::Mmap;

pub struct Weights {
    map: Mmap,
    /// Bytes of the last-level cache, where the system says.
    pub cache: Option<usize>,
}

impl Weights {
    /// At least 256 MiB and four times the last-level cache: whoever walks through them in order finds none in a cache.
    pub fn mapped() -> Weights {
        let cache = last_level_cache();
        let size = (4 * cache.unwrap_or(0)).max(256 << 20);
        let mut file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary file in target/tmp");
        let mut state = 1u32;
        let mut part = vec![0u8; 1 << 20];
        for _ in 0..size.div_ceil(part.len()) {
            for number in part.chunks_exact_mut(2) {
                // The upper half of an f32 between 1/128 and 1/32 of either sign; as bf16 the same, as f16 between 1 and 1.5.
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let bits = 0x3C00 | (state >> 16 & 0x80FF) as u16;
                number.copy_from_slice(&bits.to_le_bytes());
            }
            file.write_all(&part).expect("space for the weights in target/tmp");
        }
        // SAFETY: the file has no name, so nobody else can write to it.
        let map = unsafe { Mmap::map(&file) }.expect("a mapping of the weights");
        Weights { map, cache }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    pub fn numbers(&self) -> &[f32] {
        // SAFETY: any four bytes are an f32; `align_to` takes care of the rest.
        let (before, numbers, _) = unsafe { self.map.align_to() };
        assert!(before.is_empty(), "a mapping begins with a page");
        numbers
    }
}

/// Linux only; elsewhere unknown.
fn last_level_cache() -> Option<usize> {
    let size = (2..5).rev().find_map(|n| std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{n}/size")).ok())?;
    Some(size.trim().strip_suffix('K')?.parse::<usize>().ok()? << 10)
}
