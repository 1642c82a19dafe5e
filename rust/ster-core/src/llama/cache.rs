//! Keys and values of one sequence, in blocks of [`BLOCK`] positions anchored at position 0.
//!
//! Layers that see all that came before lie in one store. Layers with a sliding window lie in another, which forgets the blocks that no
//! later position can see.

use std::sync::Arc;

use super::config::LlamaConfig;
use crate::error::{Error, Result};
use crate::kernels::attention::BLOCK;

/// Stores of a cache: layers that see everything, layers with a window.
pub(crate) const STORES: usize = 2;

/// What one block of a store holds: `[layers of the store, kv_heads, 2 (keys, values), BLOCK, width]`, `width` = head_dim rounded up to
/// sixteen lanes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub kv_heads: usize,
    pub width: usize,
    /// Positions that windowed layers see.
    window: usize,
    /// Of each layer: its store, and which of the store's layers it is.
    places: Vec<(usize, usize)>,
    /// Layers of each store.
    counts: [usize; STORES],
}

impl Layout {
    pub fn new(config: &LlamaConfig) -> Self {
        let mut counts = [0; STORES];
        let places = (0..config.layers)
            .map(|layer| {
                let store = usize::from(config.window_of(layer).is_some());
                counts[store] += 1;
                (store, counts[store] - 1)
            })
            .collect();
        // A window that no layer has (qwen2's `max_window_layers` may lie above the last) is none: nothing may be forgotten for it.
        let window = config.window.filter(|_| counts[1] > 0).unwrap_or(usize::MAX);
        Layout { kv_heads: config.kv_heads, width: config.head_dim.next_multiple_of(16), window, places, counts }
    }

    pub fn layers(&self) -> usize {
        self.places.len()
    }

    /// In which store a layer lies, and which of its layers it is.
    pub fn place(&self, layer: usize) -> (usize, usize) {
        self.places[layer]
    }

    /// Numbers of one layer of a block.
    pub fn layer(&self) -> usize {
        self.kv_heads * 2 * BLOCK * self.width
    }

    /// Where the keys of `head` begin inside a layer of a block.
    pub fn head(&self, head: usize) -> usize {
        head * 2 * BLOCK * self.width
    }

    /// Bytes of one block in all stores.
    pub fn block_bytes(&self) -> usize {
        4 * self.layers() * self.layer()
    }

    /// The first block that a store needs when `len` positions are held: those that the next position sees.
    fn first_needed(&self, store: usize, len: usize) -> usize {
        if store == 0 { 0 } else { (len + 1).saturating_sub(self.window) / BLOCK }
    }
}

/// Clones share full blocks; a block that two caches hold is copied when one of them writes to it.
#[derive(Clone, Debug)]
pub struct KvCache {
    pub(crate) layout: Arc<Layout>,
    /// Which engine made it: keys of one model mean nothing to another.
    pub(crate) engine: u64,
    stores: [Store; STORES],
    len: usize,
    /// Layers that hold keys; fewer than all after a pass that stopped early.
    depth: usize,
    /// By which lengths its keys were rotated, where that matters: see [`Rope::regime`](super::rope::Rope::regime).
    regime: usize,
}

#[derive(Clone, Debug, Default)]
struct Store {
    /// Blocks that were there before the first of `blocks` and are forgotten.
    dropped: usize,
    blocks: Vec<Arc<Vec<f32>>>,
}

impl KvCache {
    pub(crate) fn new(layout: Arc<Layout>, engine: u64) -> Self {
        KvCache { engine, stores: Default::default(), len: 0, depth: layout.layers(), regime: 0, layout }
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The least length it can be forked at: what a shorter sequence would see of windowed layers is forgotten.
    pub fn shortest(&self) -> usize {
        match self.stores[1].dropped {
            0 => 0,
            dropped => dropped * BLOCK + self.layout.window - 1,
        }
    }

    /// Bytes of the blocks held, shared ones included.
    pub fn bytes(&self) -> usize {
        self.stores.iter().flat_map(|store| &store.blocks).map(|block| 4 * block.len()).sum()
    }

    /// The first `len` positions as a cache of their own.
    pub fn fork(&self, len: usize) -> Result<KvCache> {
        if len > self.len {
            return Err(Error::Cache { problem: format!("holds {} tokens, cannot keep {len}", self.len) });
        }
        if len < self.shortest() {
            let problem =
                format!("has forgotten what lies before its sliding window: it can keep {} tokens or more, not {len}", self.shortest());
            return Err(Error::Cache { problem });
        }
        let mut fork = KvCache { len, ..self.clone() };
        for store in &mut fork.stores {
            store.blocks.truncate(len.div_ceil(BLOCK).saturating_sub(store.dropped));
        }
        Ok(fork)
    }

    /// Where each block of a store begins, for reading; and how many were forgotten before them.
    pub(crate) fn blocks(&self, store: usize) -> (usize, impl Iterator<Item = *const f32>) {
        let store = &self.stores[store];
        (store.dropped, store.blocks.iter().map(|block| block.as_ptr()))
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

    /// Where each block of each store begins once there is room for `more` positions, and how many were forgotten before them. Positions
    /// from the current length on may be written.
    pub(crate) fn grow(&mut self, more: usize) -> [(usize, Vec<*mut f32>); STORES] {
        let (first_written, wanted) = (self.len / BLOCK, (self.len + more).div_ceil(BLOCK));
        let layout = &self.layout;
        let mut number = 0;
        self.stores.each_mut().map(|store| {
            let size = layout.counts[number] * layout.layer();
            number += 1;
            store.blocks.resize_with(wanted - store.dropped, || Arc::new(vec![0.0; size]));
            let first_written = first_written - store.dropped;
            let start = |(n, block): (usize, &mut Arc<Vec<f32>>)| {
                if n < first_written { block.as_ptr().cast_mut() } else { Arc::make_mut(block).as_mut_ptr() }
            };
            (store.dropped, store.blocks.iter_mut().enumerate().map(start).collect())
        })
    }

    /// By which lengths its keys were rotated; `None` when it has none.
    pub(crate) fn regime(&self) -> Option<usize> {
        (self.len > 0).then_some(self.regime)
    }

    /// The pass succeeded: `more` positions are there, in the first `depth` layers, rotated by the frequencies of `regime`.
    pub(crate) fn commit(&mut self, more: usize, depth: usize, regime: usize) {
        self.regime = regime;
        self.len += more;
        self.depth = depth.min(if self.len == more { depth } else { self.depth });
        for (number, store) in self.stores.iter_mut().enumerate() {
            let needed = self.layout.first_needed(number, self.len);
            if needed > store.dropped {
                store.blocks.drain(..needed - store.dropped);
                store.dropped = needed;
            }
        }
    }

    /// The pass failed: forget the room that was made for it.
    pub(crate) fn roll_back(&mut self) {
        for store in &mut self.stores {
            store.blocks.truncate(self.len.div_ceil(BLOCK) - store.dropped);
        }
    }
}
