//! Slices in, slices out; one operation a file.
//!
//! Every operation gives the same bits on every instruction set. Two devices make it so:
//! - a dot product is defined in sixteen lanes ([`simd::Lanes`]): lane `k mod 16` is an FMA chain in rising `k`, then one fixed tree.
//!   AVX-512 holds the lanes in one register, AVX2 in two, NEON in four, portable code in an array;
//! - everything else is plain scalar Rust, which the compiler may not reorder or contract, compiled once per instruction set
//!   (`per_isa!`). `exp`, `sin` and `cos` are our own ([`math`]), made of the same IEEE operations everywhere.

pub mod activation;
pub mod attention;
mod blocks;
pub mod isa;
pub mod linear;
pub mod math;
pub mod norm;
pub(crate) mod quant;
pub mod reference;
pub mod rotary;
pub(crate) mod simd;
pub mod steer;

pub use isa::Isa;
