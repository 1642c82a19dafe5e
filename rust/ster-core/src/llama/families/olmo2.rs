//! OLMo 2: norms after the sublayers instead of before, and over whole queries and keys.

use super::llama::LLAMA;
use super::{Bias, Defaults, Family, Norms, QkNorm};

pub(super) const OLMO2: Family = Family {
    name: "olmo2",
    adds: "norms after attention and MLP instead of before; norms over the whole q and k projections",
    defaults: Defaults { norm_eps: 1e-5, ..LLAMA.defaults },
    norms: Norms::After,
    qk_norm: QkNorm::Whole,
    mlp_bias: Bias::Never,
    ..LLAMA
};
