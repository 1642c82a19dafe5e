//! `exp`, `sin` and `cos` of our own: the C library's differ between machines in the last bit.
//!
//! Only operations that IEEE 754 rounds in one way are used (add, multiply, fused multiply-add, divide, integer shifts), so the bits are
//! the same wherever this is compiled; `mul_add` is one instruction where there is one and an exact function call where there is none.

/// `e^x` in f32, within 1.1 ulp of the true value; 0 below -104, infinity above 88.73, NaN for NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, then the Taylor series of `e^r` to `r^7` (its error is below 0.05 ulp), then `2^n` in two
/// steps so that results below the normal range are rounded once.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 = HIGH + LOW, HIGH with so few bits that n * HIGH is exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;

    // Comparisons that are false for NaN let it through.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -105.0 { -105.0 } else { x };
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let rounded = shifted - ROUND;
    let r = rounded.mul_add(-LN2_HIGH, x);
    let r = rounded.mul_add(-LN2_LOW, r);

    let p = 1.0 / 5040.0;
    let p = r.mul_add(p, 1.0 / 720.0);
    let p = r.mul_add(p, 1.0 / 120.0);
    let p = r.mul_add(p, 1.0 / 24.0);
    let p = r.mul_add(p, 1.0 / 6.0);
    let p = r.mul_add(p, 0.5);
    let p = (r * r).mul_add(p, r) + 1.0;

    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// `2^n` for `-126 <= n <= 127`.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `(sin x, cos x)` of an f32 angle, each rounded from a value good to about 1e-15: the correctly rounded f32 or, in one case in a
/// hundred million, its neighbour.
///
/// The quarter turn is taken off in f64 with pi/2 in three parts (Cody and Waite), which is exact far past any position a model can
/// have (2^24 radians and more), then the Taylor series on `|r| <= pi / 4`.
#[inline(always)]
pub fn sin_cos(angle: f32) -> (f32, f32) {
    const TWO_OVER_PI: f64 = std::f64::consts::FRAC_2_PI;
    // pi / 2 = A + B + C to 160 bits: each part is the f64 nearest to what is left.
    const A: f64 = std::f64::consts::FRAC_PI_2;
    const B: f64 = 6.123_233_995_736_766e-17;
    const C: f64 = -1.497_384_904_859_169_8e-33;
    const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52

    let x = f64::from(angle);
    let shifted = x.mul_add(TWO_OVER_PI, ROUND);
    let quarter = shifted.to_bits() & 3;
    let n = shifted - ROUND;
    let r = n.mul_add(-A, x);
    let r = n.mul_add(-B, r);
    let r = n.mul_add(-C, r);
    let z = r * r;

    let s = -1.0 / 1_307_674_368_000.0;
    let s = z.mul_add(s, 1.0 / 6_227_020_800.0);
    let s = z.mul_add(s, -1.0 / 39_916_800.0);
    let s = z.mul_add(s, 1.0 / 362_880.0);
    let s = z.mul_add(s, -1.0 / 5_040.0);
    let s = z.mul_add(s, 1.0 / 120.0);
    let s = z.mul_add(s, -1.0 / 6.0);
    let sin = (r * z).mul_add(s, r);

    let c = 1.0 / 20_922_789_888_000.0;
    let c = z.mul_add(c, -1.0 / 87_178_291_200.0);
    let c = z.mul_add(c, 1.0 / 479_001_600.0);
    let c = z.mul_add(c, -1.0 / 3_628_800.0);
    let c = z.mul_add(c, 1.0 / 40_320.0);
    let c = z.mul_add(c, -1.0 / 720.0);
    let c = z.mul_add(c, 1.0 / 24.0);
    let cos = (z * z).mul_add(c, z.mul_add(-0.5, 1.0));

    let (sin, cos) = match quarter {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    };
    (sin as f32, cos as f32)
}

/// `tanh x` in f32, within 3 ulp of the true value; NaN for NaN.
///
/// Small `x`: the Taylor series to `x^9`, whose next term is below 1e-8 of the sum. Else `(1 - t) / (1 + t)` with `t = e^(-2|x|)`, where
/// nothing cancels.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    const SMALL: f32 = 0.25;
    let size = x.abs();
    let square = x * x;
    let p = square.mul_add(62.0 / 2835.0, -17.0 / 315.0);
    let p = square.mul_add(p, 2.0 / 15.0);
    let p = square.mul_add(p, -1.0 / 3.0);
    let near = (square * x).mul_add(p, x);
    let t = exp(-2.0 * size);
    let far = ((1.0 - t) / (1.0 + t)).copysign(x);
    if size < SMALL { near } else { far }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance in units of the last place of the true value's f32 neighbourhood.
    fn ulps(found: f32, truth: f64) -> f64 {
        let near = truth as f32;
        let ulp = if near.abs() < f32::MIN_POSITIVE { f32::from_bits(1) } else { near.abs().next_up() - near.abs() };
        (f64::from(found) - truth).abs() / f64::from(ulp)
    }

    #[test]
    fn exp_is_within_1_1_ulp_everywhere() {
        let mut worst = (0.0, 0.0);
        for step in 0..4_000_000 {
            let x = -104.0 + step as f32 * (192.7 / 4e6);
            let found = ulps(exp(x), libm::exp(f64::from(x)));
            if found > worst.0 {
                worst = (found, x);
            }
        }
        assert!(worst.0 <= 1.1, "{worst:?}");
    }

    #[test]
    fn exp_at_its_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert!(exp(88.72).is_finite());
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(-103.0), libm::exp(-103.0) as f32);
    }

    #[test]
    fn tanh_is_within_3_ulp_everywhere() {
        let mut worst = (0.0, 0.0);
        for step in 0..2_000_000 {
            // Every exponent, both signs, and dense where the two formulas meet.
            let size = 10f64.powf(-40.0 + 41.5 * f64::from(step) / 2e6) as f32;
            for x in [size, -size, 0.25 + (size - 10.0) * 1e-3] {
                let found = ulps(tanh(x), libm::tanh(f64::from(x)));
                if found > worst.0 {
                    worst = (found, x);
                }
            }
        }
        assert!(worst.0 <= 3.0, "{worst:?}");
        assert_eq!([tanh(f32::INFINITY), tanh(f32::NEG_INFINITY), tanh(0.0)], [1.0, -1.0, 0.0]);
        assert!(tanh(f32::NAN).is_nan());
    }

    #[test]
    fn sin_and_cos_round_to_the_nearest_or_its_neighbour() {
        let mut angles: Vec<f32> = (0..1_000_000).map(|n| n as f32 * 0.173).collect();
        angles.extend((0..200_000).map(|n| n as f32)); // position times an inverse frequency of 1
        angles.extend((0..24).map(|n| (1u32 << n) as f32 * std::f32::consts::FRAC_PI_2)); // where all leading digits cancel
        angles.extend([0.0, -0.0, 1e-30, 16_777_215.0]);
        for angle in angles {
            let (sin, cos) = sin_cos(angle);
            let (true_sin, true_cos) = (libm::sin(f64::from(angle)), libm::cos(f64::from(angle)));
            assert!(ulps(sin, true_sin) <= 0.501, "sin {angle}: {sin} {true_sin}");
            assert!(ulps(cos, true_cos) <= 0.501, "cos {angle}: {cos} {true_cos}");
        }
    }
}
