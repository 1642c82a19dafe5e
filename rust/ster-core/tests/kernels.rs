//! Every kernel against `kernels::reference` (f64) at awkward sizes and magnitudes, and bit for bit against itself on every instruction set.
//!
//! Tolerances follow Higham, "Accuracy and Stability of Numerical Algorithms", sections 2.2 and 3.1: `U = 2^-24` bounds the relative
//! error of one rounding, `gamma(n) = nU / (1 - nU)` that of n in a row, and `TINY = 2^-150` (half the smallest subnormal) the absolute
//! error of a rounding whose result is below the normal range. The reference's own error, `2^-53` an operation, hides in the slack of a
//! bound that takes every rounding at its worst; where it does not, the comment says so.

mod support;

use std::ops::Range;

use proptest::prelude::*;
use proptest::sample::select;
use ster_core::kernels::activation::{self, Activation};
use ster_core::kernels::attention::{self, BLOCK, Head, Rows, Score};
use ster_core::kernels::linear::{COLUMN_GRAIN, Then, linear};
use ster_core::kernels::{Isa, norm, reference, rotary, steer};
use ster_core::tensor::{Dtype, Panel, Shared, Weights};
use support::{Rng, SIZES, Size, bits, stored};

const U: f64 = 1.0 / (1u64 << 24) as f64;
const TINY: f64 = f64::from_bits((1023 - 150) << 52);

fn gamma(n: usize) -> f64 {
    let n = n as f64 * U;
    n / (1.0 - n)
}

/// Whether the kernel was right: within `bound` of the truth, or past f32 where the truth or a sum on the way to it is (`reach` bounds
/// all of them).
fn judge(what: &str, found: f32, truth: f64, bound: f64, reach: f64) {
    if reach >= f64::from(f32::MAX) {
        return;
    }
    let error = (f64::from(found) - truth).abs();
    assert!(error <= bound, "{what}: found {found:e}, truth {truth:e}, error {error:e} is {} times its bound", error / bound);
}

const LENGTHS: [usize; 6] = [1, 3, 17, 63, 64, 65];

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![3 => select(&LENGTHS[..]), 1 => 1..130usize]
}

/// A few, and as many as sixteens are made of.
fn row_count() -> impl Strategy<Value = usize> {
    prop_oneof![3 => 1..10usize, 1 => 10..100usize, 1 => Just(64), 1 => 124..129usize]
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

// ------------------------------------------------------------------------------------------------------------------------- linear

/// Operands of one product; the weights begin at an odd address.
struct Product {
    rows: usize,
    k: usize,
    n: usize,
    dtype: Dtype,
    x: Vec<f32>,
    bytes: Vec<u8>,
    bias: Option<Vec<f32>>,
    start: Vec<f32>,
    then: Then,
}

impl Product {
    fn random((rows, k, n): (usize, usize, usize), dtype: Dtype, sizes: (Size, Size), bias: bool, then: Then, seed: u64) -> Product {
        let mut rng = Rng::new(seed);
        let bytes = [vec![0], stored(&sizes.1.many(&mut rng, n * k), dtype)].concat();
        Product {
            rows,
            k,
            n,
            dtype,
            x: sizes.0.many(&mut rng, rows * k),
            bytes,
            bias: bias.then(|| sizes.1.many(&mut rng, n)),
            start: sizes.0.many(&mut rng, rows * n),
            then,
        }
    }

    fn weights(&self) -> Weights<'_> {
        Weights::new(&self.bytes[1..], self.dtype, self.n, self.k)
    }

    fn run(&self, isa: Isa) -> Vec<f32> {
        let mut out = self.start.clone();
        linear(isa, &self.x, self.weights(), self.bias.as_deref(), Panel::whole(&mut out, self.rows, self.n), self.then);
        out
    }

    /// The same, cut into panels.
    fn run_cut(&self, isa: Isa, rows: &[Range<usize>], columns: &[Range<usize>]) -> Vec<f32> {
        let mut out = self.start.clone();
        let shared = Shared::new(&mut out, self.rows, self.n);
        for rows in rows {
            for columns in columns {
                // SAFETY: one panel at a time.
                let panel = unsafe { shared.panel(rows.clone(), columns.clone()) };
                let x = &self.x[rows.start * self.k..rows.end * self.k];
                linear(isa, x, self.weights(), self.bias.as_deref(), panel, self.then);
            }
        }
        out
    }

    /// A lane is a chain of `ceil(k / 16)` FMAs, four additions join the lanes, one adds the bias, one the residual: no term passes more
    /// roundings than that. Additions are exact below the normal range; each of the `k` FMAs may lose `TINY` there.
    fn check(&self, found: &[f32]) {
        let truth = reference::linear(&self.x, self.weights(), self.bias.as_deref());
        let roundings = gamma(self.k.div_ceil(16) + 6);
        let mut w = vec![0.0; self.k];
        for column in 0..self.n {
            self.weights().widen_row(column, &mut w);
            for row in 0..self.rows {
                let at = row * self.n + column;
                let x = &self.x[row * self.k..(row + 1) * self.k];
                let start = if self.then == Then::Add { f64::from(self.start[at]) } else { 0.0 };
                let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[column]));
                let absolute: f64 = x.iter().zip(&w).map(|(&x, &w)| f64::from(x).abs() * f64::from(w).abs()).sum();
                let reach = absolute + bias.abs() + start.abs();
                let what = format!("row {row} column {column}");
                judge(&what, found[at], start + truth[at], roundings * reach + self.k as f64 * TINY, reach);
            }
        }
    }
}

fn dtype() -> impl Strategy<Value = Dtype> {
    select(&[Dtype::F32, Dtype::F16, Dtype::BF16][..])
}

fn then() -> impl Strategy<Value = Then> {
    select(&[Then::Store, Then::Add][..])
}

fn size() -> impl Strategy<Value = Size> {
    select(&SIZES[..])
}

prop_compose! {
    fn product()(
        shape in (row_count(), length(), length()), dtype in dtype(), sizes in (size(), size()), bias: bool, then in then(), seed: u64,
    ) -> Product {
        Product::random(shape, dtype, sizes, bias, then, seed)
    }
}

impl std::fmt::Debug for Product {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Product { rows, k, n, dtype, then, .. } = self;
        write!(f, "[{rows}, {k}] x [{n}, {k}] {dtype:?} bias {} {then:?}", self.bias.is_some())
    }
}

/// `0..size` in at most `parts + 1` ranges.
fn cut(size: usize, parts: usize, rng: &mut Rng) -> Vec<Range<usize>> {
    let mut ends: Vec<usize> = (0..parts).map(|_| rng.below(size + 1)).chain([0, size]).collect();
    ends.sort_unstable();
    ends.dedup();
    ends.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

proptest! {
    #![proptest_config(config(600))]

    #[test]
    fn linear_is_within_its_bound_and_the_same_on_every_instruction_set(product in product()) {
        let portable = product.run(Isa::PORTABLE);
        product.check(&portable);
        for isa in Isa::available() {
            assert_eq!(bits(&product.run(isa)), bits(&portable), "{}", isa.name());
        }
    }

    #[test]
    fn linear_of_a_row_and_a_column_does_not_depend_on_how_the_matrix_is_cut(product in product(), parts in 0..6usize, seed: u64) {
        let mut rng = Rng::new(seed);
        let (rows, columns) = (cut(product.rows, parts, &mut rng), cut(product.n, parts, &mut rng));
        for isa in Isa::available() {
            assert_eq!(bits(&product.run_cut(isa, &rows, &columns)), bits(&product.run(isa)), "{} {rows:?} {columns:?}", isa.name());
        }
    }
}

#[test]
fn linear_at_every_awkward_shape() {
    for (n, &k) in LENGTHS.iter().enumerate() {
        for (m, &columns) in LENGTHS.iter().enumerate() {
            for rows in (1..10).chain([16, 17, 64, 77, 126]) {
                let dtype = [Dtype::F32, Dtype::F16, Dtype::BF16][(n + m + rows) % 3];
                let sizes = (SIZES[(n + rows) % 5], SIZES[(m + rows) % 5]);
                let product =
                    Product::random((rows, k, columns), dtype, sizes, rows % 2 == 0, Then::Store, (n * 100 + m * 10 + rows) as u64);
                let portable = product.run(Isa::PORTABLE);
                product.check(&portable);
                for isa in Isa::available() {
                    assert_eq!(bits(&product.run(isa)), bits(&portable), "{} {product:?}", isa.name());
                }
            }
        }
    }
}

#[test]
fn linear_of_more_rows_than_fit_the_cache_is_that_of_each_row() {
    for (rows, k, columns) in [(75, 3001, COLUMN_GRAIN + 5), (9, 30_000, COLUMN_GRAIN + 5), (130, 2501, 5 * COLUMN_GRAIN + 1)] {
        let product = Product::random((rows, k, columns), Dtype::BF16, (Size::Usual, Size::Usual), true, Then::Add, 5);
        let singles: Vec<_> = (0..rows).map(|row| row..row + 1).collect();
        let whole = product.run(Isa::PORTABLE);
        product.check(&whole);
        for isa in Isa::available() {
            assert_eq!(bits(&product.run(isa)), bits(&whole), "{}", isa.name());
            let cut = product.run_cut(isa, &singles, &[0..COLUMN_GRAIN, COLUMN_GRAIN..product.n]);
            assert_eq!(bits(&cut), bits(&whole), "{}", isa.name());
        }
    }
}

/// `k` in one span and in several, of which the last is shorter; columns in whole groups, whole sixteens, whole tiles and one by one.
#[test]
fn linear_of_sixteens_of_rows_is_that_of_each_row() {
    for (n, k) in [1023, 1024, 1025, 1536, 2501].into_iter().enumerate() {
        for (m, (rows, columns)) in [(64, 48), (80, 55), (126, 97), (143, 115), (144, 7)].into_iter().enumerate() {
            let dtype = [Dtype::F32, Dtype::F16, Dtype::BF16][(n + m) % 3];
            let then = [Then::Store, Then::Add][(n + m) % 2];
            let product = Product::random((rows, k, columns), dtype, (Size::Usual, Size::Usual), m % 2 == 0, then, (10 * n + m) as u64);
            let singles: Vec<_> = (0..rows).map(|row| row..row + 1).collect();
            for isa in Isa::available() {
                let cut = product.run_cut(isa, &singles, &[0..3, 3..columns]);
                assert_eq!(bits(&product.run(isa)), bits(&cut), "{} {product:?}", isa.name());
            }
        }
    }
}

#[test]
fn linear_writes_its_panel_and_nothing_else() {
    for (rows, columns) in [(1..4, 3..37), (2..66, 5..103)] {
        let (height, width) = (rows.end + 1, columns.end + 3);
        let product = Product::random((height, 17, width), Dtype::F16, (Size::Usual, Size::Usual), false, Then::Store, 3);
        for isa in Isa::available() {
            let out = product.run_cut(isa, std::slice::from_ref(&rows), std::slice::from_ref(&columns));
            for (at, (found, start)) in out.iter().zip(&product.start).enumerate() {
                let (row, column) = (at / width, at % width);
                let inside = rows.contains(&row) && columns.contains(&column);
                assert!(inside || found.to_bits() == start.to_bits(), "{} wrote row {row} column {column}", isa.name());
            }
        }
    }
}

/// Rows share registers, and one must not spoil the others.
#[test]
fn linear_keeps_nan_in_its_row() {
    for rows in [64, 127] {
        let mut product = Product::random((rows, 70, 13), Dtype::BF16, (Size::Usual, Size::Usual), true, Then::Store, 11);
        let sound = product.run(Isa::PORTABLE);
        product.x[5 * 70 + 69] = f32::NAN;
        product.x[15 * 70] = f32::INFINITY;
        for isa in Isa::available() {
            for (row, (found, sound)) in product.run(isa).chunks(13).zip(sound.chunks(13)).enumerate() {
                if [5, 15].contains(&row) {
                    assert!(found.iter().all(|value| !value.is_finite()));
                } else {
                    assert_eq!(bits(found), bits(sound), "{} row {row}", isa.name());
                }
            }
        }
    }
}

#[test]
fn linear_lets_nan_and_infinity_through() {
    for isa in Isa::available() {
        for (spoiled, dtype) in [(f32::NAN, Dtype::F32), (f32::INFINITY, Dtype::F16), (f32::NEG_INFINITY, Dtype::BF16)] {
            for at in [0, 15, 16, 64] {
                let mut w = vec![1.0; 65];
                w[at] = spoiled;
                let bytes = stored(&w, dtype);
                for rows in [2, 64] {
                    let mut out = vec![0.0f32; rows];
                    let w = Weights::new(&bytes, dtype, 1, 65);
                    linear(isa, &vec![1.0; rows * 65], w, None, Panel::whole(&mut out, rows, 1), Then::Store);
                    assert!(out.iter().all(|v| v.is_nan() == spoiled.is_nan() && !v.is_finite()), "{out:?}");
                }
            }
        }
    }
}

// --------------------------------------------------------------------------------------------------------------------------- norm

proptest! {
    #![proptest_config(config(400))]

    /// Squares and their sum are f64. `r` is rounded to f32 once, `x r` once, `(x r) gain` once: `gamma(3)`, and one more for what f64
    /// leaves. Below the normal range `r` loses TINY (times x and gain), `x r` loses TINY (times gain), the result TINY.
    #[test]
    fn rms_norm_is_within_its_bound_and_the_same_on_every_instruction_set(
        rows in 1..10usize, hidden in length(), sizes in (size(), size()), eps in select(&[1e-5, 1e-6][..]), seed: u64,
    ) {
        let mut rng = Rng::new(seed);
        let mut x = sizes.0.many(&mut rng, rows * hidden);
        if sizes.0 == Size::Huge {
            x.iter_mut().for_each(|x| *x *= 1e19); // to 1e37: the sum of squares is far past f32
        }
        let gain = sizes.1.many(&mut rng, hidden);
        let mut portable = vec![0.0; x.len()];
        norm::rms_norm(Isa::PORTABLE, &mut portable, &x, &gain, eps);
        let truth = reference::rms_norm(&x, &gain, eps);
        for (at, &found) in portable.iter().enumerate() {
            let (x, gain) = (f64::from(x[at]).abs(), f64::from(gain[at % hidden]).abs());
            judge(&format!("{at}"), found, truth[at], gamma(4) * truth[at].abs() + TINY * (1.01 * x * gain + gain + 1.0), truth[at].abs());
        }
        for isa in Isa::available() {
            let mut out = vec![0.0; x.len()];
            norm::rms_norm(isa, &mut out, &x, &gain, eps);
            assert_eq!(bits(&out), bits(&portable), "{}", isa.name());
            for row in 0..rows {
                let mut alone = vec![0.0; hidden];
                norm::rms_norm(isa, &mut alone, &x[row * hidden..][..hidden], &gain, eps);
                assert_eq!(bits(&alone), bits(&out[row * hidden..][..hidden]), "row {row} alone");
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------- activation

/// The bound on `activation(x) * up`, where `f` is the true activation. `e = exp(.)` is within an ulp, that is `2U`.
fn activation_bound(activation: Activation, x: f64, up: f64, f: f64) -> f64 {
    let relative = match activation {
        // e: 2U, scaled by e / (1 + e) <= 1; 1 + e, the quotient, the product: U each.
        Activation::Silu => gamma(5),
        // f64 to f32, the product; and f64's error, magnified by the steepness of erfc, at most 2 z^2 < 1500 before it is zero.
        Activation::Gelu => gamma(2) + 1500.0 * 4.0 * f64::EPSILON,
        // u carries six roundings (x^2, x^3, the constants, the FMA, the product): |2u| 6U in the exponent counts by e / (1 + e).
        Activation::GeluTanh => {
            let u2 = 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3)).abs();
            let steep = if x > 0.0 { (-u2).exp() } else { 1.0 };
            gamma(5) + 1.1 * steep * (u2.min(100.0) * gamma(6))
        }
    };
    // e^-x is past f32 below -88.72: what is then lost is x e^x <= 89 e^-88.72 = 2.7e-37. The last term is the reference's own, which
    // takes 1 + tanh in f64.
    let lost = match activation {
        Activation::Silu => 2.7e-37,
        Activation::Gelu => TINY,
        Activation::GeluTanh => 2.7e-37 + x.abs() * f64::EPSILON,
    };
    relative * (f * up).abs() + (lost + TINY) * up.abs() + TINY
}

proptest! {
    #![proptest_config(config(600))]

    #[test]
    fn gate_is_within_its_bound_and_the_same_on_every_instruction_set(
        activation in select(&[Activation::Silu, Activation::Gelu, Activation::GeluTanh][..]),
        count in length(), sizes in (size(), size()), spread in select(&[1.0f32, 5.0, 40.0, 200.0][..]), seed: u64,
    ) {
        let mut rng = Rng::new(seed);
        let mut x = sizes.0.many(&mut rng, count);
        if sizes.0 == Size::Usual {
            x.iter_mut().for_each(|x| *x *= spread);
        }
        let up = sizes.1.many(&mut rng, count);
        let mut portable = x.clone();
        activation::gate(Isa::PORTABLE, &mut portable, &up, activation);
        for ((&found, &x), &up) in portable.iter().zip(&x).zip(&up) {
            let (f, up) = (reference::activation(x, activation), f64::from(up));
            judge(&format!("{activation:?} {x:e} {up:e}"), found, f * up, activation_bound(activation, f64::from(x), up, f), (f * up).abs());
        }
        for isa in Isa::available() {
            let mut out = x.clone();
            activation::gate(isa, &mut out, &up, activation);
            assert_eq!(bits(&out), bits(&portable), "{}", isa.name());
        }
    }
}

#[test]
fn activations_at_their_edges() {
    for isa in Isa::available() {
        for act in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
            let mut gate = [0.0, -0.0, f32::MAX, -f32::MAX, 1e20, -1e20, f32::INFINITY, f32::NAN];
            activation::gate(isa, &mut gate, &[1.0; 8], act);
            assert_eq!(bits(&gate[..2]), bits(&[0.0, -0.0]), "{act:?}");
            assert_eq!(gate[2..7], [f32::MAX, 0.0, 1e20, 0.0, f32::INFINITY], "{act:?}");
            assert!(gate[7].is_nan());
        }
    }
}

// ------------------------------------------------------------------------------------------------------------------------- rotary

proptest! {
    #![proptest_config(config(300))]

    /// The angle is one f32 product, which is part of the definition. Its sine is within 0.501 ulp, so 1.002 U, of the truth, and the
    /// factor costs one more rounding.
    #[test]
    fn angles_are_right_to_the_last_bit_or_next_to_it_at_any_position(
        position in prop_oneof![0..300usize, 0..(1usize << 24)], half in length(), theta in select(&[10_000f64, 500_000.0, 2.0][..]),
        factor in select(&[1.0f32, 1.138_629_4][..]),
    ) {
        let inverse: Vec<f32> = (0..half).map(|i| theta.powf(-(i as f64) / half as f64) as f32).collect();
        let (mut cos, mut sin) = (vec![0.0; half], vec![0.0; half]);
        rotary::angles(Isa::PORTABLE, &mut cos, &mut sin, position, &inverse, factor);
        for i in 0..half {
            let angle = f64::from(position as f32 * inverse[i]);
            for (found, truth) in [(cos[i], libm::cos(angle)), (sin[i], libm::sin(angle))] {
                let truth = truth * f64::from(factor);
                judge(&format!("position {position} pair {i}"), found, truth, 2.01 * U * truth.abs() + 2.0 * TINY, truth.abs());
            }
        }
        for isa in Isa::available() {
            let (mut c, mut s) = (vec![0.0; half], vec![0.0; half]);
            rotary::angles(isa, &mut c, &mut s, position, &inverse, factor);
            assert_eq!((bits(&c), bits(&s)), (bits(&cos), bits(&sin)), "{}", isa.name());
        }
    }
}

proptest! {
    #![proptest_config(config(300))]

    /// Sine and cosine are off by 1.002 U, each product by U, or by nothing inside the FMA, and the sum by U: `gamma(4)` of both terms.
    #[test]
    fn rotate_is_within_its_bound_and_leaves_what_follows_the_head(half in length(), size in size(), position in 0..100_000usize, seed: u64) {
        let mut rng = Rng::new(seed);
        let x = size.many(&mut rng, 2 * half);
        let inverse: Vec<f32> = (0..half).map(|i| 10_000f64.powf(-(i as f64) / half as f64) as f32).collect();
        let (mut cos, mut sin) = (vec![0.0; half], vec![0.0; half]);
        rotary::angles(Isa::PORTABLE, &mut cos, &mut sin, position, &inverse, 1.0);
        let angles: Vec<f64> = inverse.iter().map(|inverse| f64::from(position as f32 * inverse)).collect();
        let truth = reference::rotate(&x, &angles);
        let mut portable = vec![7.0; 2 * half + 3];
        rotary::rotate(Isa::PORTABLE, &mut portable, &x, &cos, &sin);
        for at in 0..2 * half {
            let pair = at % half;
            let (low, high) = (f64::from(x[pair]).abs(), f64::from(x[pair + half]).abs());
            let (cos, sin) = (angles[pair].cos().abs(), angles[pair].sin().abs());
            let terms = if at < half { low * cos + high * sin } else { high * cos + low * sin };
            judge(&format!("{at}"), portable[at], truth[at], gamma(4) * terms + 3.0 * TINY, terms);
        }
        prop_assert_eq!(&portable[2 * half..], &[7.0; 3]);
        for isa in Isa::available() {
            let mut out = vec![7.0; 2 * half + 3];
            rotary::rotate(isa, &mut out, &x, &cos, &sin);
            assert_eq!(bits(&out), bits(&portable), "{}", isa.name());
        }
    }
}

// ----------------------------------------------------------------------------------------------------------------------- attention

/// One KV head in blocks as a cache lays them, with unused numbers around it that must not count.
struct Cached {
    blocks: Vec<Vec<f32>>,
    offset: usize,
    width: usize,
}

impl Cached {
    fn new(keys: &[f32], values: &[f32], head_dim: usize) -> Cached {
        let (width, offset) = (head_dim.next_multiple_of(16), 37);
        let positions = keys.len() / head_dim;
        let mut blocks = vec![vec![f32::NAN; offset + 2 * BLOCK * width + 5]; positions.div_ceil(BLOCK)];
        for position in 0..positions {
            let block = &mut blocks[position / BLOCK];
            for (numbers, start) in [(keys, offset), (values, offset + BLOCK * width)] {
                let to = start + position % BLOCK * width;
                block[to..to + head_dim].copy_from_slice(&numbers[position * head_dim..][..head_dim]);
                block[to + head_dim..to + width].fill(0.0);
            }
        }
        Cached { blocks, offset, width }
    }

    fn attend(&self, isa: Isa, q: &[f32], head_dim: usize, rows: Rows, score: Score) -> Vec<f32> {
        let mut padded = vec![0.0; rows.count * self.width];
        for (to, from) in padded.chunks_exact_mut(self.width).zip(q.chunks_exact(head_dim)) {
            to[..head_dim].copy_from_slice(from);
        }
        let longest = rows.first + (rows.count - 1) / rows.group;
        let blocks: Vec<*const f32> = self.blocks[..longest.div_ceil(BLOCK)].iter().map(|block| block.as_ptr()).collect();
        let head = Head { blocks: &blocks, offset: self.offset, width: self.width };
        let mut scores = vec![f32::NAN; rows.count * longest];
        let mut out = vec![f32::NAN; padded.len()];
        attention::attend(isa, &padded, rows, head, score, &mut scores, &mut out);
        out.chunks_exact(self.width).flat_map(|row| row[..head_dim].to_vec()).collect()
    }
}

/// What a row of attention may be off by. With `n = ceil(width / 16) + 5` roundings in a scaled score, the exponent of position j is off
/// by `E_j = gamma(n) scale sum|q k_j| + U |s_j - max|`, and exp itself by 2U; the error of the maximum is common to all and cancels. A
/// weight `w_j` is so off by `w_j (e^E - 1)`, in the numerator and once more in the denominator. The numerator is a chain of at most
/// BLOCK FMAs and one addition a block; the denominator (an f64 sum) is rounded once, and so is the quotient. Exponentials below the
/// normal range lose TINY each, and so do FMAs. A soft cap makes no error larger (its slope is at most 1) and adds a division, 3 ulp of
/// tanh and a product, each relative to the capped score.
fn attention_bounds(q: &[f32], keys: &[f32], values: &[f32], score: Score) -> Vec<f64> {
    let scale = score.scale;
    let width = q.len();
    let dot = |k: &[f32], absolute: bool| -> f64 {
        let products = q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k));
        f64::from(scale) * products.map(|p| if absolute { p.abs() } else { p }).sum::<f64>()
    };
    let capped = |s: f64| score.cap.map_or(s, |cap| f64::from(cap) * (s / f64::from(cap)).tanh());
    let scores: Vec<f64> = keys.chunks_exact(width).map(|k| capped(dot(k, false))).collect();
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let n = width.div_ceil(16) + 5;
    let cap = |s: f64| if score.cap.is_some() { gamma(10) * s.abs() } else { 0.0 };
    let off: Vec<f64> = keys
        .chunks_exact(width)
        .zip(&scores)
        .map(|(k, s)| (gamma(n) * dot(k, true) + cap(*s) + U * (s - highest).abs() + 2.0 * U + width as f64 * TINY).min(100.0).exp_m1())
        .collect();
    let weights: Vec<f64> = scores.iter().map(|s| (s - highest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let denominator: f64 = weights.iter().zip(&off).map(|(w, off)| w * off).sum::<f64>() / sum;
    let chain = gamma(BLOCK.min(scores.len()) + scores.len().div_ceil(BLOCK) + 3);
    (0..width)
        .map(|c| {
            let value = |j: usize| f64::from(values[j * width + c]).abs();
            let absolute: f64 = (0..scores.len()).map(|j| weights[j] / sum * value(j)).sum();
            let numerator: f64 = (0..scores.len()).map(|j| weights[j] / sum * off[j] * value(j) + TINY * (value(j) + 1.0)).sum();
            let total = absolute * (denominator + chain) + numerator;
            if denominator > 0.3 { f64::INFINITY } else { 1.5 * total + TINY } // 1.5: products of two errors, each below 0.3
        })
        .collect()
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn attention_is_within_its_bound_the_same_everywhere_and_row_by_row(
        tokens in 1..6usize, group in 1..5usize, past in prop_oneof![Just(0usize), length()], head_dim in select(&[2usize, 8, 16, 24, 64, 80][..]),
        sizes in (select(&[Size::Usual, Size::Tiny, Size::Subnormal, Size::Mixed][..]), size()),
        sharp in select(&[0.01f32, 1.0, 30.0][..]), window in prop_oneof![Just(usize::MAX), 1..200usize],
        cap in select(&[None, None, Some(30.0f32), Some(1.5)][..]), seed: u64,
    ) {
        let mut rng = Rng::new(seed);
        let positions = past + tokens;
        let mut q = sizes.0.many(&mut rng, tokens * group * head_dim);
        q.iter_mut().for_each(|q| *q *= if sizes.0 == Size::Mixed { 1e-14 } else { sharp });
        let key_size = if sizes.0 == Size::Mixed { Size::Mixed } else { Size::Usual };
        let keys = key_size.many(&mut rng, positions * head_dim);
        let values = sizes.1.many(&mut rng, positions * head_dim);
        let score = Score { scale: (1.0 / (head_dim as f64).sqrt()) as f32, cap };
        let cached = Cached::new(&keys, &values, head_dim);
        let rows = Rows { count: tokens * group, group, first: past + 1, window };
        let portable = cached.attend(Isa::PORTABLE, &q, head_dim, rows, score);

        for row in 0..rows.count {
            let end = past + 1 + row / group;
            let seen = end.saturating_sub(window) * head_dim..end * head_dim;
            let query = &q[row * head_dim..][..head_dim];
            let truth = reference::attention(query, &keys[seen.clone()], &values[seen.clone()], f64::from(score.scale), cap.map(f64::from));
            let bounds = attention_bounds(query, &keys[seen.clone()], &values[seen], score);
            for c in 0..head_dim {
                judge(&format!("row {row} column {c}"), portable[row * head_dim + c], truth[c], bounds[c], 0.0);
            }
        }
        for isa in Isa::available() {
            assert_eq!(bits(&cached.attend(isa, &q, head_dim, rows, score)), bits(&portable), "{}", isa.name());
            for row in 0..rows.count {
                let end = past + 1 + row / group;
                let one = Rows { count: 1, group: 1, first: end, window };
                let alone = cached.attend(isa, &q[row * head_dim..][..head_dim], head_dim, one, score);
                // The same without the blocks that lie before its window.
                let skipped = end.saturating_sub(window) / BLOCK;
                let later = Cached { blocks: cached.blocks[skipped..].to_vec(), offset: cached.offset, width: cached.width };
                let short = Rows { first: end - skipped * BLOCK, ..one };
                assert_eq!(bits(&later.attend(isa, &q[row * head_dim..][..head_dim], head_dim, short, score)), bits(&alone));
                assert_eq!(bits(&alone), bits(&portable[row * head_dim..][..head_dim]), "{} row {row} alone", isa.name());
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------------------------------ steering

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn add_scaled_rounds_the_product_and_then_the_sum(count in length(), sizes in (size(), size()), scale in size(), seed: u64) {
        let mut rng = Rng::new(seed);
        let (h, v) = (sizes.0.many(&mut rng, count), sizes.1.many(&mut rng, count));
        let scale = scale.one(&mut rng);
        for isa in Isa::available() {
            let mut out = h.clone();
            steer::add_scaled(isa, &mut out, &v, scale);
            for i in 0..count {
                // A product of two f32 is exact in f64, and so is the rounding of a sum of two f32 that went through f64 (Figueroa 1995:
                // 53 >= 2 * 24 + 2): each line rounds once.
                let product = (f64::from(scale) * f64::from(v[i])) as f32;
                let sum = (f64::from(h[i]) + f64::from(product)) as f32;
                assert_eq!(out[i].to_bits(), sum.to_bits(), "{} + {scale} * {}", h[i], v[i]);
            }
        }
    }

    #[test]
    fn the_norm_of_a_row_neither_overflows_nor_underflows(count in length(), size in size(), seed: u64) {
        let mut rng = Rng::new(seed);
        let mut x = size.many(&mut rng, count);
        if size == Size::Huge {
            x.iter_mut().for_each(|x| *x *= 1e20);
        }
        let truth = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        // Squares are exact; the sums differ in order only: count roundings of 2^-53 each, halved by the root.
        prop_assert!((steer::norm(&x) - truth).abs() <= (count + 2) as f64 * f64::EPSILON / 2.0 * truth);
    }

    #[test]
    fn a_number_that_is_not_finite_is_seen_wherever_it_stands(count in length(), size in size(), seed: u64) {
        let mut rng = Rng::new(seed);
        let mut x = size.many(&mut rng, count);
        x[0] = f32::MAX;
        prop_assert!(steer::all_finite(&x));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0xFF80_0001)] {
            let mut x = x.clone();
            x[rng.below(count)] = bad;
            prop_assert!(!steer::all_finite(&x));
        }
    }
}
