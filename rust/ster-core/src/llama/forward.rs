//! The forward pass over a ragged batch.
//!
//! Reference: `LlamaForCausalLM` of transformers and its neighbours, in f32. Deviations: no padding exists (rows of all sequences are packed, attention runs
//! per sequence over its own keys); the pass stops at the deepest layer anyone needs; the last block a sequence needs computes queries,
//! output projection and MLP for the rows that are kept alone; sums follow the order fixed in [`crate::kernels`], so that none of this
//! shows in a single bit.

use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use super::cache::{KvCache, Layout};
use super::config::LlamaConfig;
use super::families::QkNorm;
use super::pass::{Pass, Workspace};
use super::rope::RopeScaling;
use super::weights::{LlamaWeights, Rounding};
use crate::batch::{LogitRows, Output, Sequence};
use crate::checkpoint::{Form, Source};
use crate::error::{Error, Result};
use crate::kernels::Isa;
use crate::pool::{DefaultFloats, Interrupt, Pool};
use crate::tensor::Dtype;

/// A Llama checkpoint ready to run: weights where they lie in the file, and the threads that multiply them.
pub struct SteeringLlama {
    pub(super) config: LlamaConfig,
    pub(super) weights: LlamaWeights,
    pub(super) form: Form,
    pub(super) layout: Arc<Layout>,
    pub(super) isa: Isa,
    threads: usize,
    id: u64,
    warnings: Vec<String>,
    engine_room: EngineRoom,
}

/// What a pass needs again next time; one pass at a time.
///
/// Threads do not survive a fork of the process, and a lock that a thread held stays locked: a child leaves its parent's room alone and
/// opens the next.
struct EngineRoom {
    process: u32,
    tools: Mutex<Tools>,
    next: OnceLock<Box<EngineRoom>>,
}

struct Tools {
    /// Taken out when the room is dropped in a child, which must not join its parent's threads.
    pool: ManuallyDrop<Pool>,
    workspace: Workspace,
}

impl EngineRoom {
    fn new(threads: usize) -> Self {
        let tools = Tools { pool: ManuallyDrop::new(Pool::new(threads)), workspace: Workspace::default() };
        EngineRoom { process: std::process::id(), tools: Mutex::new(tools), next: OnceLock::new() }
    }

    /// The tools of this process, once no other thread uses them. Waits in small steps, so that `interrupt` can end it.
    fn enter(&self, threads: usize, interrupt: Interrupt<'_>) -> Result<MutexGuard<'_, Tools>> {
        let mut room = self;
        while room.process != std::process::id() {
            room = room.next.get_or_init(|| Box::new(EngineRoom::new(threads)));
        }
        let mut asked = Instant::now();
        loop {
            match room.tools.try_lock() {
                Ok(tools) => return Ok(tools),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => {}
            }
            if asked.elapsed() > Duration::from_millis(20) {
                asked = Instant::now();
                if interrupt() {
                    return Err(Error::Interrupted);
                }
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

impl Drop for EngineRoom {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            let tools = self.tools.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
            // SAFETY: dropped once, here; nothing uses the room afterwards.
            unsafe { ManuallyDrop::drop(&mut tools.pool) };
        }
    }
}

impl SteeringLlama {
    /// Open a model: a folder or a GGUF file. Every tensor is checked against the config; no weight matrix is read.
    ///
    /// `threads`: all that the machine offers when `None`. The instruction set is the best there is, or what `STER_KERNELS` names.
    pub fn load(path: &Path, threads: Option<usize>) -> Result<Self> {
        Self::load_with(path, threads, Isa::choose()?)
    }

    pub fn load_with(path: &Path, threads: Option<usize>, isa: Isa) -> Result<Self> {
        Self::load_rounded(path, threads, isa, None, &|| false, &|_, _| {})
    }

    /// The same with all weights rounded to F16 or BF16 first. Those that are not stored so are then held in memory. `interrupt` is asked
    /// while they are; `report` is told how many bytes are done, and of how many.
    pub fn load_rounded(
        path: &Path,
        threads: Option<usize>,
        isa: Isa,
        round: Option<Dtype>,
        interrupt: Interrupt<'_>,
        report: &dyn Fn(u64, u64),
    ) -> Result<Self> {
        let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get().min(1024)));
        if !(1..=1024).contains(&threads) {
            return Err(Error::Threads { found: threads });
        }
        let source = Source::open(path)?;
        let config = LlamaConfig::from_source(&source)?;
        let form = source.form;
        if form.interleaved && (config.rotary_dim != config.head_dim || config.family.qk_norm != QkNorm::None) {
            let problem = format!("has interleaved heads, which a {} model does not have", config.family.name);
            return Err(Error::File { path: path.into(), problem });
        }
        let weights = LlamaWeights::rounded(&source.checkpoint, &config, form, &Rounding { to: round, threads, interrupt, report })?;
        let layout = Arc::new(Layout::new(&config)); // now that every layer's tensors are there
        let warnings = weights.warnings.clone();
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let engine_room = EngineRoom::new(threads);
        Ok(SteeringLlama { config, weights, form, layout, isa, threads, id, warnings, engine_room })
    }

    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    pub fn weights(&self) -> &LlamaWeights {
        &self.weights
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    pub fn threads(&self) -> usize {
        self.threads
    }

    /// What loading noticed and went on from.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Bytes of one block of a cache: `kernels::attention::BLOCK` positions in all layers.
    pub fn cache_block_bytes(&self) -> usize {
        self.layout.block_bytes()
    }

    pub fn cache(&self) -> KvCache {
        KvCache::new(self.layout.clone(), self.id)
    }

    /// A sequence must be shorter than this. Linear and dynamic scaling stretch `max_position_embeddings`; the configs of the other kinds,
    /// and of families that rotate windowed layers otherwise (Gemma 3), already state the stretched length.
    pub fn context_length(&self) -> usize {
        let stretch = match self.config.rope.scaling {
            _ if self.config.local_rope.is_some() => 1.0,
            RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor, .. } => factor.max(1.0),
            _ => 1.0,
        };
        (self.config.context as f64 * stretch) as usize
    }

    /// Where keys of shorter sequences mean nothing to longer ones (longrope): the length up to which they hold.
    pub fn switches_after(&self) -> Option<usize> {
        self.config.rope.switches_after()
    }

    /// One pass over all sequences. `interrupt` is asked every few hundredths of a second, by the calling thread.
    ///
    /// Everything that can be refused is refused before anything runs. Caches are extended on success and left as they were on failure.
    pub fn forward(&self, sequences: &mut [Sequence<'_>], interrupt: Interrupt<'_>) -> Result<Vec<Output>> {
        // First, for a vector of subnormals is not zero, whatever the caller's thread thinks of it.
        let _floats = DefaultFloats::set();
        let depths = sequences.iter().enumerate().map(|(n, s)| self.check(n, s)).collect::<Result<Vec<_>>>()?;

        let mut tools = self.engine_room.enter(self.threads, interrupt)?;
        let tools = &mut *tools;
        let result = Pass::new(self, sequences, &depths, &mut tools.pool, &mut tools.workspace, interrupt).run();
        for (sequence, depth) in sequences.iter_mut().zip(depths) {
            let more = sequence.tokens.len();
            if let Some(cache) = &mut sequence.cache {
                let regime = self.config.rope.regime(self.config.context, cache.len() + more);
                if result.is_ok() { cache.commit(more, depth, regime) } else { cache.roll_back() }
            }
        }
        result
    }

    /// Refuse what cannot run; otherwise how many blocks this sequence needs.
    fn check(&self, index: usize, sequence: &Sequence<'_>) -> Result<usize> {
        let config = &self.config;
        let tokens = sequence.tokens;
        let past = sequence.past();
        if tokens.is_empty() {
            return Err(Error::NoTokens { sequence: index });
        }
        if past + tokens.len() >= self.context_length() {
            return Err(Error::Context { tokens: past + tokens.len(), limit: self.context_length(), sequence: index });
        }
        if let Some(position) = tokens.iter().position(|&id| id as usize >= config.vocab) {
            return Err(Error::TokenId { id: tokens[position], position: past + position, sequence: index, vocab: config.vocab });
        }
        let layers = &sequence.capture.layers;
        if let Some(&layer) = layers.iter().find(|&&layer| layer >= config.layers) {
            return Err(Error::Layer { layer, layers: config.layers });
        }
        if !layers.is_sorted_by(|a, b| a < b) {
            return Err(Error::LayerOrder { layers: layers.clone() });
        }
        for edit in &sequence.steering.edits {
            edit.check(config.layers, config.hidden, self.context_length())?;
        }
        let depth = match (sequence.logits, layers.last(), &sequence.cache) {
            (LogitRows::None, Some(layer), _) => layer + 1,
            (LogitRows::None, None, None) => 0,
            _ => config.layers,
        };
        if sequence.cache.is_some() && sequence.prefix.is_some() {
            return Err(Error::Cache { problem: "of a sequence cannot stand beside a prefix".into() });
        }
        if let Some(cache) = sequence.cache.as_deref().or(sequence.prefix) {
            cache.check(self.id, depth)?;
        }
        if let (Some(last), Some(cache)) = (self.switches_after(), sequence.cache.as_deref().or(sequence.prefix))
            && cache.regime().is_some_and(|regime| regime != config.rope.regime(config.context, past + tokens.len()))
        {
            let (held, asked) = if past + tokens.len() > last { ("at most", "longer") } else { ("more than", "shorter") };
            let problem = format!("holds keys rotated for sequences of {held} {last} tokens; a {asked} one must run from its start");
            return Err(Error::Cache { problem });
        }
        Ok(depth)
    }
}
