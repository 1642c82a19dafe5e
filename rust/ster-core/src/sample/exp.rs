//! [`libm::exp`] where a draw needs it: the same bits, many at once.

/// `e^x` for `x <= 0`, bit for bit what [`libm::exp`] gives, without its branches, so that a loop over it becomes vector instructions.
///
/// `x = k ln 2 + r` with `|r| <= ln 2 / 2`, a rational function of `r`, then `2^k`. Source: FreeBSD's `e_exp.c`, as libm has it.
#[inline(always)]
pub fn exp(x: f64) -> f64 {
    const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    const INV_LN2: f64 = std::f64::consts::LOG2_E;
    const P1: f64 = 1.666_666_666_666_660_2e-1;
    const P2: f64 = -2.777_777_777_701_559_3e-3;
    const P3: f64 = 6.613_756_321_437_934e-5;
    const P4: f64 = -1.653_390_220_546_525_2e-6;
    const P5: f64 = 4.138_136_797_057_238_5e-8;
    // libm compares high words only: these are the smallest numbers past its borders, 0.5 ln 2 and 2^-28.
    const HALF_LN2: f64 = f64::from_bits(0x3FD6_2E43_0000_0000);
    const TINY: f64 = f64::from_bits(0x3E30_0001_0000_0000);
    const UNDERFLOW: f64 = -745.133_219_101_941_1;

    let k = INV_LN2 * x - 0.5;
    let k = if k > -1100.0 { k } else { -1100.0 };
    // SAFETY: NaN has become -1100, and the rest lies between that and -0.5.
    let k: i32 = unsafe { k.to_int_unchecked() };
    let k = if x.abs() >= HALF_LN2 { k } else { 0 };
    let high = x - f64::from(k) * LN2_HIGH;
    let low = f64::from(k) * LN2_LOW;
    let r = high - low;
    let rr = r * r;
    let c = r - rr * (P1 + rr * (P2 + rr * (P3 + rr * (P4 + rr * P5))));
    let y = 1.0 + (r * c / (2.0 - c) - low + high);
    // In two steps: 2^k alone may be below the normal range. The first is exact, so the result is rounded once.
    let scaled = y * f64::from_bits(((k + 100 + 1023) as u64) << 52) * f64::from_bits((1023 - 100) << 52);
    let scaled = if x.abs() >= TINY { scaled } else { 1.0 + x };
    // False for NaN, which has come this far.
    if x < UNDERFLOW { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[track_caller]
    fn same(x: f64) {
        assert_eq!(exp(x).to_bits(), libm::exp(x).to_bits(), "{x:e}");
    }

    #[test]
    fn exp_has_the_bits_of_libm() {
        for step in 0..3_000_000 {
            same(f64::from(step) * -0.000_25); // to -750: past underflow
            same(f64::from(step) * -3e-7);
        }
        // Every exponent, and a few mantissas of each.
        for high in 0x8000..0xFFF0u64 {
            for low in [0, 1, 0x0000_1234_5678_9ABC, 0x0000_FFFF_FFFF_FFFF] {
                same(f64::from_bits(high << 48 | low));
            }
        }
    }

    #[test]
    fn exp_has_the_bits_of_libm_at_every_border() {
        const LN2: f64 = std::f64::consts::LN_2;
        let mut borders = vec![-708.396_418_532_264_1, -745.133_219_101_941_1, -f64::powi(2.0, -28)];
        borders.extend((0..2200).map(|k| f64::from(k) * -0.5 * LN2));
        borders.extend([0xBFD6_2E42u64, 0xBFF0_A2B2, 0xBE30_0000, 0xC086_232B].map(|high| f64::from_bits(high << 32)));
        borders.extend([0xBFD6_2E43u64, 0xBFF0_A2B3, 0xBE30_0001, 0xC086_232C].map(|high| f64::from_bits(high << 32)));
        for border in borders {
            for step in -300..300i64 {
                let x = f64::from_bits(border.to_bits().wrapping_add_signed(step));
                if x <= 0.0 {
                    same(x);
                }
            }
        }
        for x in [0.0, -0.0, -f64::from_bits(1), -f64::MIN_POSITIVE, f64::MIN, f64::NEG_INFINITY] {
            same(x);
        }
        assert!(exp(f64::NAN).is_nan());
    }
}
