//! Keys and values of one sequence, in blocks of [`BLOCK`] positions anchored at position 0.

use std::sync::Arc;

use super::config::LlamaConfig;
use crate::error::{Error, Result};
use crate::kernels::attention::BLOCK;

/// What one block holds: `[layers, kv_heads, 2 (keys, values), BLOCK, width]`, `width` = head_dim rounded up to sixteen lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub layers: usize,
    pub kv_heads: usize,
    pub width: usize,
}

impl Layout {
    pub fn new(config: &LlamaConfig) -> Self {
        Layout { layers: config.layers, kv_heads: config.kv_heads, width: config.head_dim.next_multiple_of(16) }
    }

    /// Numbers of one layer of a block.
    pub fn layer(&self) -> usize {
        self.kv_heads * 2 * BLOCK * self.width
    }

    /// Where the keys of `head` begin inside a layer of a block.
    pub fn head(&self, head: usize) -> usize {
        head * 2 * BLOCK * self.width
    }
}

/// Clones share full blocks; a block that two caches hold is copied when one of them writes to it.
#[derive(Clone, Debug)]
pub struct KvCache {
    pub(crate) layout: Layout,
    /// Which engine made it: keys of one model mean nothing to another.
    pub(crate) engine: u64,
    blocks: Vec<Arc<Vec<f32>>>,
    len: usize,
    /// Layers that hold keys; fewer than all after a pass that stopped early.
    depth: usize,
}

impl KvCache {
    pub(crate) fn new(layout: Layout, engine: u64) -> Self {
        KvCache { layout, engine, blocks: Vec::new(), len: 0, depth: layout.layers }
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first `len` positions as a cache of their own.
    pub fn fork(&self, len: usize) -> Result<KvCache> {
        if len > self.len {
            return Err(Error::Cache { problem: format!("holds {} tokens, cannot keep {len}", self.len) });
        }
        let blocks = self.blocks[..len.div_ceil(BLOCK)].to_vec();
        Ok(KvCache { blocks, len, ..*self })
    }

    /// Where each block begins, for reading.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = *const f32> {
        self.blocks.iter().map(|block| block.as_ptr())
    }

    pub(crate) fn check(&self, engine: u64, depth: usize) -> Result<()> {
        if self.engine != engine {
            return Err(Error::Cache { problem: "belongs to another engine".into() });
        }
        if self.len > 0 && depth > self.depth {
            let problem = format!("holds layers 0..{} only: the pass that filled it stopped there", self.depth - 1);
            return Err(Error::Cache { problem });
        }
        Ok(())
    }

    /// Where each block begins once there is room for `more` positions. Those from the current length on may be written.
    pub(crate) fn grow(&mut self, more: usize) -> Vec<*mut f32> {
        let size = self.layout.layers * self.layout.layer();
        let wanted = (self.len + more).div_ceil(BLOCK);
        self.blocks.resize_with(wanted, || Arc::new(vec![0.0; size]));
        let first_written = self.len / BLOCK;
        self.blocks
            .iter_mut()
            .enumerate()
            .map(|(n, block)| if n < first_written { block.as_ptr().cast_mut() } else { Arc::make_mut(block).as_mut_ptr() })
            .collect()
    }

    /// The pass succeeded: `more` positions are there, in the first `depth` layers.
    pub(crate) fn commit(&mut self, more: usize, depth: usize) {
        self.len += more;
        self.depth = depth.min(if self.len == more { depth } else { self.depth });
    }

    /// The pass failed: forget the room that was made for it.
    pub(crate) fn roll_back(&mut self) {
        self.blocks.truncate(self.len.div_ceil(BLOCK));
    }
}
