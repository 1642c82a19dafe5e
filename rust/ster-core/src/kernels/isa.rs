//! Which instruction set runs.

use crate::error::{Error, Result};

/// An instruction set this processor has: holding one is the proof that its kernels may be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(pub(crate) Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Isa {
    /// Plain Rust: runs anywhere, slowly where there is no FMA instruction to compile to.
    pub const PORTABLE: Isa = Isa(Kind::Portable);

    /// All that this processor has, the fastest first.
    pub fn available() -> Vec<Isa> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx2 && avx512 {
                found.push(Isa(Kind::Avx512));
            }
            if avx2 {
                found.push(Isa(Kind::Avx2));
            }
        }
        #[cfg(target_arch = "aarch64")]
        found.push(Isa(Kind::Neon));
        found.push(Isa::PORTABLE);
        found
    }

    /// The fastest one, or the one that `STER_KERNELS` names.
    pub fn choose() -> Result<Isa> {
        match std::env::var_os("STER_KERNELS") {
            None => Ok(Isa::available()[0]),
            Some(name) => Isa::named(&name.to_string_lossy()),
        }
    }

    pub fn named(name: &str) -> Result<Isa> {
        const NAMES: [&str; 4] = ["avx512", "avx2", "neon", "portable"];
        let problem = match Isa::available().into_iter().find(|isa| isa.name() == name) {
            Some(isa) => return Ok(isa),
            None if NAMES.contains(&name) => "is not an instruction set of this processor",
            None => "is unknown; expected avx512, avx2, neon or portable",
        };
        Err(Error::Kernels { name: name.to_string(), problem: problem.to_string() })
    }

    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => "neon",
            Kind::Portable => "portable",
        }
    }
}

/// Compile one generic kernel for every instruction set and choose among them at run time.
///
/// `per_isa!(pub fn name(arg: Type, ...) = generic);` makes `name(isa, arg, ...)`, which calls `generic::<V>(arg, ...)` inside a
/// function that has the instruction set switched on. `generic` and all it calls must be `#[inline(always)]`, or they are compiled
/// without it.
macro_rules! per_isa {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $generic:ident) => {
        $(#[$doc])*
        $vis fn $name(isa: $crate::kernels::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            fn avx512($($arg: $ty),*) {
                $generic::<$crate::kernels::simd::avx512::V>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) {
                $generic::<$crate::kernels::simd::avx2::V>($($arg),*)
            }
            match isa.0 {
                // SAFETY: an `Isa` is only made for instruction sets that were detected.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::isa::Kind::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::isa::Kind::Avx2 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "aarch64")]
                $crate::kernels::isa::Kind::Neon => $generic::<$crate::kernels::simd::neon::V>($($arg),*),
                $crate::kernels::isa::Kind::Portable => $generic::<$crate::kernels::simd::portable::V>($($arg),*),
            }
        }
    };
}
pub(crate) use per_isa;
