//! Weights in GGUF's block formats: the numbers are those that gguf-py makes of the same bytes, and products are those of the numbers in
//! f32, bit for bit.

mod support;

use proptest::prelude::*;
use proptest::sample::select;
use ster_core::kernels::Isa;
use ster_core::kernels::linear::{Then, linear};
use ster_core::tensor::{Dtype, Panel, Shared, Weights};
use support::{Rng, Size, bits};

const FORMATS: [Dtype; 11] = [
    Dtype::Q4_0,
    Dtype::Q4_1,
    Dtype::Q5_0,
    Dtype::Q5_1,
    Dtype::Q8_0,
    Dtype::Q2K,
    Dtype::Q3K,
    Dtype::Q4K,
    Dtype::Q5K,
    Dtype::Q6K,
    Dtype::IQ4NL,
];

/// Where a block's f16 numbers stand.
fn halves(format: Dtype) -> &'static [usize] {
    match format {
        Dtype::Q4_1 | Dtype::Q5_1 | Dtype::Q4K | Dtype::Q5K => &[0, 2],
        Dtype::Q2K => &[80, 82],
        Dtype::Q3K => &[108],
        Dtype::Q6K => &[208],
        _ => &[0],
    }
}

#[test]
fn numbers_are_those_of_gguf_py() {
    let mut left = &include_bytes!("data/ggml_blocks.bin")[..];
    let mut take = |count: usize| {
        let (taken, rest) = left.split_at(count);
        left = rest;
        taken
    };
    let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
    for format in FORMATS {
        assert_eq!(Dtype::of_ggml(word(take(4))), Some(format));
        let count = word(take(4)) as usize;
        let (numbers, size) = format.block();
        let w = Weights::new(take(count * size), format, count, numbers);
        for block in 0..count {
            let mut row = vec![0.0; numbers];
            w.widen_row(block, &mut row);
            let expected: Vec<u32> = take(4 * numbers).chunks(4).map(word).collect();
            assert_eq!(bits(&row), expected, "{} block {block}", format.name());
        }
    }
    assert!(left.is_empty());
}

#[test]
fn formats_are_named_and_sized_as_in_ggml() {
    for (id, name, cols, bytes) in [
        (0, "F32", 3, Some(12)),
        (1, "F16", 3, Some(6)),
        (30, "BF16", 3, Some(6)),
        (2, "Q4_0", 64, Some(36)),
        (3, "Q4_1", 64, Some(40)),
        (6, "Q5_0", 64, Some(44)),
        (7, "Q5_1", 64, Some(48)),
        (8, "Q8_0", 48, None),
        (10, "Q2_K", 256, Some(84)),
        (11, "Q3_K", 512, Some(220)),
        (12, "Q4_K", 576, None),
        (13, "Q5_K", 256, Some(176)),
        (14, "Q6_K", 256, Some(210)),
        (20, "IQ4_NL", 32, Some(18)),
        (8, "Q8_0", usize::MAX - 31, None),
    ] {
        let dtype = Dtype::of_ggml(id).unwrap();
        assert_eq!((dtype.name(), dtype.row_bytes(cols)), (name, bytes));
    }
    assert_eq!(Dtype::of_ggml(9), None);
}

#[test]
#[should_panic(expected = "a row of 48 numbers is not whole blocks of Q8_0")]
fn a_row_of_half_a_block_is_refused() {
    Weights::new(&[0; 51], Dtype::Q8_0, 1, 48);
}

#[test]
#[should_panic(expected = "weight bytes do not fill [2, 256]")]
fn a_missing_byte_is_refused() {
    Weights::new(&[0; 2 * 144 - 1], Dtype::Q4K, 2, 256);
}

/// Operands of one product; the weights begin at an odd address.
struct Product {
    rows: usize,
    k: usize,
    n: usize,
    format: Dtype,
    x: Vec<f32>,
    bytes: Vec<u8>,
    bias: Option<Vec<f32>>,
    start: Vec<f32>,
    then: Then,
}

impl Product {
    /// Every bit of the weights is random, but that scales are finite.
    fn random((rows, blocks, n): (usize, usize, usize), format: Dtype, size: Size, bias: bool, then: Then, seed: u64) -> Product {
        let mut rng = Rng::new(seed);
        let (numbers, block) = format.block();
        let k = blocks * numbers;
        let mut bytes: Vec<u8> = (0..1 + n * blocks * block).map(|_| rng.next() as u8).collect();
        for block in bytes[1..].chunks_exact_mut(block) {
            for &at in halves(format) {
                // The sign and five bits of exponent: all ones would be infinite or no number.
                block[at + 1] &= if block[at + 1] & 0x7C == 0x7C { 0xBF } else { 0xFF };
            }
        }
        Product {
            rows,
            k,
            n,
            format,
            x: size.many(&mut rng, rows * k),
            bytes,
            bias: bias.then(|| size.many(&mut rng, n)),
            start: size.many(&mut rng, rows * n),
            then,
        }
    }

    fn weights(&self) -> Weights<'_> {
        Weights::new(&self.bytes[1..], self.format, self.n, self.k)
    }

    /// By the definition: widened first.
    fn expected(&self, isa: Isa) -> Vec<f32> {
        let mut wide = vec![0.0; self.n * self.k];
        for (row, out) in wide.chunks_exact_mut(self.k).enumerate() {
            self.weights().widen_row(row, out);
        }
        self.of(isa, Weights::of_f32(&wide, self.n, self.k))
    }

    fn of(&self, isa: Isa, w: Weights<'_>) -> Vec<f32> {
        let mut out = self.start.clone();
        linear(isa, &self.x, w, self.bias.as_deref(), Panel::whole(&mut out, self.rows, self.n), self.then);
        out
    }

    /// Each row and each column alone.
    fn of_pieces(&self, isa: Isa) -> Vec<f32> {
        let mut out = self.start.clone();
        let shared = Shared::new(&mut out, self.rows, self.n);
        for (row, x) in self.x.chunks_exact(self.k).enumerate() {
            for column in 0..self.n {
                // SAFETY: one panel at a time.
                let panel = unsafe { shared.panel(row..row + 1, column..column + 1) };
                linear(isa, x, self.weights(), self.bias.as_deref(), panel, self.then);
            }
        }
        out
    }

    fn check(&self) {
        let expected = bits(&self.expected(Isa::PORTABLE));
        for isa in Isa::available() {
            assert_eq!(bits(&self.of(isa, self.weights())), expected, "{} {self:?}", isa.name());
            assert_eq!(bits(&self.of_pieces(isa)), expected, "{} {self:?} in pieces", isa.name());
        }
    }
}

impl std::fmt::Debug for Product {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Product { rows, k, n, format, then, .. } = self;
        write!(f, "[{rows}, {k}] x [{n}, {k}] {} bias {} {then:?}", format.name(), self.bias.is_some())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_product_is_that_of_the_numbers_in_f32(
        format in select(&FORMATS[..]),
        shape in (1..10usize, 1..20usize, 1..30usize),
        size in select(&[Size::Usual, Size::Tiny, Size::Subnormal, Size::Mixed][..]),
        bias: bool, then in select(&[Then::Store, Then::Add][..]), seed: u64,
    ) {
        // As many numbers at most of every format.
        let blocks = if format.block().0 == 256 { shape.1.div_ceil(5) } else { shape.1 };
        Product::random((shape.0, blocks, shape.2), format, size, bias, then, seed).check();
    }
}

/// Rows beyond the register tiles, k beyond what the first-level cache holds of widened rows.
#[test]
fn many_rows_and_long_ones() {
    for (n, format) in FORMATS.into_iter().enumerate() {
        let unit = 256 / format.block().0;
        Product::random((35, 3 * unit, 14), format, Size::Usual, true, Then::Store, n as u64).check();
        Product::random((5, 17 * unit, 13), format, Size::Mixed, false, Then::Add, n as u64).check();
        Product::random((70, 9 * unit, 50), format, Size::Usual, true, Then::Add, n as u64).check();
    }
}

#[test]
fn no_scale_hides_what_is_not_finite() {
    for isa in Isa::available() {
        for format in FORMATS {
            let (numbers, size) = format.block();
            let mut bytes = vec![0x11; size];
            for &at in halves(format) {
                bytes[at..at + 2].copy_from_slice(&0x7E00u16.to_le_bytes());
            }
            for rows in [1, 3] {
                let mut out = vec![0.0f32; rows];
                let w = Weights::new(&bytes, format, 1, numbers);
                linear(isa, &vec![1.0; rows * numbers], w, None, Panel::whole(&mut out, rows, 1), Then::Store);
                assert!(out.iter().all(|v| v.is_nan()), "{} {}: {out:?}", isa.name(), format.name());
            }
        }
    }
}
