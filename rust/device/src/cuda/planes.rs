//! The KV storage in a GPU's memory. Blocks look as on a CPU, but for keys, which lie as values do ([`crate::kv_layout`]).

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    DeviceBlocks, DeviceError, KvCacheSpec, KvLayer, KvSide,
    kernel_args::{CopyBlocksArgs, DevicePtr},
};

use super::{
    CudaError,
    driver::{DeviceMemory, Driver, bytes_of},
    kernels::{Kernel, launch},
    memory::Scratch,
    swap::Swap,
};

/// Memory for the same bytes of every block.
pub struct Plane {
    /// `[num_blocks, len]`.
    pub memory: DeviceMemory,
    /// Where in a block its bytes begin.
    pub start: usize,
    /// Bytes of a block.
    pub len: usize,
}

/// Planes of blocks of one length, which a kernel copies together.
struct CopiedPlanes {
    len: usize,
    count: usize,
    /// Their addresses.
    table: DeviceMemory,
}

/// Where the kernels find a layer's keys and values.
pub struct LayerPlanes {
    /// Keys of block 0.
    pub k_plane: DevicePtr,
    /// Values of block 0.
    pub v_plane: DevicePtr,
    /// Bytes from a block to the next one.
    pub block_stride: usize,
}

/// The blocks of a KV storage: a plane for each K and each V, which all groups use, where the layers of all groups lie alike;
/// else one.
pub struct PlaneBlocks {
    driver: Arc<dyn Driver>,
    /// Ascending; together whole blocks.
    planes: Vec<Plane>,
    copied: Vec<CopiedPlanes>,
    copy_blocks: Kernel,
    /// What is copied to what, used again by each copy, for freeing memory waits for the GPU.
    pairs: Mutex<Scratch>,
    swap: Mutex<Swap>,
}

/// `[start, end)` of the planes in a block.
fn cuts(spec: &KvCacheSpec, block_bytes: usize) -> Vec<[usize; 2]> {
    let of_layer = |layer: &KvLayer| {
        [KvSide::Key, KvSide::Value].map(|side| {
            let start = spec.plane_offset(layer, side);
            [start, start + spec.plane_block_bytes(&layer.shape, side)]
        })
    };
    // Keys that are values too have no other plane.
    let mut cuts: Vec<_> = spec.layers.iter().flat_map(of_layer).filter(|[start, end]| start < end).collect();
    cuts.sort_unstable();
    cuts.dedup();
    if cuts.windows(2).all(|pair| pair[0][1] == pair[1][0]) { cuts } else { vec![[0, block_bytes]] }
}

impl PlaneBlocks {
    /// Allocates and zeroes `spec.num_blocks` blocks of so many bytes.
    pub fn new(driver: &Arc<dyn Driver>, spec: &KvCacheSpec, block_bytes: usize) -> Result<Self, CudaError> {
        let plane = |[start, end]: [usize; 2]| {
            let len = end - start;
            Ok(Plane { memory: DeviceMemory::zeroed(driver, spec.num_blocks * len)?, start, len })
        };
        let planes = cuts(spec, block_bytes).into_iter().map(plane).collect::<Result<Vec<_>, CudaError>>()?;
        let mut by_len: BTreeMap<usize, Vec<DevicePtr>> = BTreeMap::new();
        for plane in &planes {
            by_len.entry(plane.len).or_default().push(plane.memory.at());
        }
        let table = |(len, table): (usize, Vec<DevicePtr>)| {
            Ok(CopiedPlanes { len, count: table.len(), table: DeviceMemory::of(driver, &table)? })
        };
        let copied = by_len.into_iter().map(table).collect::<Result<_, CudaError>>()?;
        let copy_blocks = Kernel::named("copy_blocks")?;
        let swap = Mutex::new(Swap::new(driver, block_bytes));
        Ok(Self { driver: Arc::clone(driver), planes, copied, copy_blocks, pairs: Mutex::default(), swap })
    }

    /// Where a layer's keys and values are.
    pub fn layer(&self, spec: &KvCacheSpec, layer: &KvLayer) -> LayerPlanes {
        let [key, value] = [KvSide::Key, KvSide::Value].map(|side| self.plane(spec.plane_offset(layer, side)));
        // Equally wide keys and values make equally long planes.
        debug_assert_eq!(key.0.len, value.0.len, "bytes between blocks");
        let [k_plane, v_plane] = [key, value].map(|(plane, at)| plane.memory.at() + at as u64);
        LayerPlanes { k_plane, v_plane, block_stride: key.0.len }
    }

    /// Where a layer's keys are, which are its values too, and the bytes from a block to the next one.
    pub fn latent_layer(&self, spec: &KvCacheSpec, layer: &KvLayer) -> (DevicePtr, usize) {
        let (plane, at) = self.plane(spec.plane_offset(layer, KvSide::Key));
        (plane.memory.at() + at as u64, plane.len)
    }

    /// The plane with byte `offset` of every block, and where it is in its part.
    fn plane(&self, offset: usize) -> (&Plane, usize) {
        let plane = &self.planes[self.planes.partition_point(|plane| plane.start <= offset) - 1];
        (plane, offset - plane.start)
    }

    fn try_copy_blocks(&self, pairs: &[(u32, u32)]) -> Result<(), CudaError> {
        let mut scratch = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        for pairs in independent(pairs) {
            let flat: Vec<u32> = pairs.iter().flat_map(|&(source, destination)| [source, destination]).collect();
            let list = scratch.bytes(&self.driver, size_of_val(&flat[..]))?;
            self.driver.upload(list, bytes_of(&flat))?;
            for planes in &self.copied {
                let args = CopyBlocksArgs {
                    planes: planes.table.at(),
                    pairs: list,
                    block_bytes: planes.len as u64,
                    num_pairs: pairs.len() as u32,
                    num_planes: planes.count as u32,
                };
                // SAFETY: the block ids were checked against the planes; the list is written to after the kernel, in the stream's
                // order.
                unsafe { launch(&self.driver, self.copy_blocks, [pairs.len(), planes.count, 1], &args)? };
            }
        }
        Ok(())
    }

    fn swap(&self) -> MutexGuard<'_, Swap> {
        self.swap.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceBlocks for PlaneBlocks {
    fn upload(&self, block: usize, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let (plane, at) = self.plane(offset);
        Ok(plane.memory.upload(block * plane.len + at, bytes)?)
    }

    fn download(&self, block: usize, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let (plane, at) = self.plane(offset);
        Ok(plane.memory.download(block * plane.len + at, bytes)?)
    }

    fn copy_blocks(&self, pairs: &[(u32, u32)]) -> Result<(), DeviceError> {
        Ok(self.try_copy_blocks(pairs)?)
    }

    fn export_blocks(&self, blocks: &[u32]) -> Result<Vec<Vec<u8>>, DeviceError> {
        Ok(self.swap().copy_out(&self.planes, blocks)?)
    }

    fn import_block(&self, block: u32, bytes: &[u8]) -> Result<(), DeviceError> {
        Ok(self.swap().copy_in(&self.planes, block, bytes)?)
    }
}

/// Runs of pairs that may be copied in any order: none reads or writes what another one of its run writes.
fn independent(pairs: &[(u32, u32)]) -> impl Iterator<Item = &[(u32, u32)]> {
    let mut rest = pairs;
    std::iter::from_fn(move || {
        let clash = |n: usize| {
            let (source, destination) = rest[n];
            rest[..n].iter().any(|&(s, d)| source == d || destination == d || destination == s)
        };
        let run = (1..rest.len()).find(|&n| clash(n)).unwrap_or(rest.len());
        let (run, after) = rest.split_at(run);
        rest = after;
        (!run.is_empty()).then_some(run)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_ends_where_order_matters() {
        let runs = |pairs: &[(u32, u32)]| independent(pairs).map(<[_]>::to_vec).collect::<Vec<_>>();
        assert_eq!(runs(&[]), Vec::<Vec<_>>::new());
        assert_eq!(runs(&[(1, 2), (1, 3), (4, 5)]), [vec![(1, 2), (1, 3), (4, 5)]]);
        assert_eq!(runs(&[(1, 3), (3, 4)]), [vec![(1, 3)], vec![(3, 4)]], "4 is what 3 has become");
        assert_eq!(runs(&[(1, 3), (2, 3)]), [vec![(1, 3)], vec![(2, 3)]], "the last one stays");
        assert_eq!(runs(&[(1, 3), (2, 1), (5, 6)]), [vec![(1, 3)], vec![(2, 1), (5, 6)]], "3 is what 1 was");
        assert_eq!(runs(&[(2, 2)]), [vec![(2, 2)]]);
    }
}
