//! The KV storage in a GPU's memory. Blocks look as on a CPU, but for keys, which lie as values do ([`crate::kv_layout`]).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{
    KvCacheSpec,
    kernel_args::{CopyBlocksArgs, DevicePtr},
};

use super::{
    CudaError,
    driver::{DeviceMemory, Driver},
    kernels::{Kernel, launch},
    swap::Swap,
};

/// K plane 0, V plane 0, K plane 1, ...
pub struct DevicePlanes {
    driver: Arc<dyn Driver>,
    planes: Vec<DeviceMemory>,
    /// Their addresses.
    table: DeviceMemory,
    block_bytes: usize,
    copy_blocks: Kernel,
    swap: Mutex<Swap>,
}

impl DevicePlanes {
    /// Allocates and zeroes `plane_bytes` for each plane.
    pub fn new(driver: &Arc<dyn Driver>, spec: &KvCacheSpec, plane_bytes: usize) -> Result<Self, CudaError> {
        let planes =
            (0..2 * spec.num_planes).map(|_| DeviceMemory::zeroed(driver, plane_bytes)).collect::<Result<Vec<_>, _>>()?;
        let table = DeviceMemory::of(driver, &planes.iter().map(DeviceMemory::at).collect::<Vec<DevicePtr>>())?;
        let copy_blocks = Kernel::named("copy_blocks")?;
        let block_bytes = spec.layout().block_bytes;
        let swap = Mutex::new(Swap::new(driver, block_bytes, planes.len()));
        Ok(Self { driver: Arc::clone(driver), planes, table, block_bytes, copy_blocks, swap })
    }

    /// Address of the K and V planes of a layer.
    pub fn layer(&self, plane: usize) -> [DevicePtr; 2] {
        [self.planes[2 * plane].at(), self.planes[2 * plane + 1].at()]
    }

    /// Copies whole blocks `(source, destination)`, as if one after the other.
    pub fn copy_blocks(&self, pairs: &[(u32, u32)]) -> Result<(), CudaError> {
        for pairs in independent(pairs) {
            let flat: Vec<u32> = pairs.iter().flat_map(|&(source, destination)| [source, destination]).collect();
            let list = DeviceMemory::of(&self.driver, &flat)?;
            let args = CopyBlocksArgs {
                planes: self.table.at(),
                pairs: list.at(),
                block_bytes: self.block_bytes as u64,
                num_pairs: pairs.len() as u32,
                num_planes: self.planes.len() as u32,
            };
            // SAFETY: the block ids were checked against the planes; the list is freed after the kernel, in the stream's order.
            unsafe { launch(&self.driver, self.copy_blocks, [pairs.len(), self.planes.len(), 1], &args)? };
        }
        Ok(())
    }

    /// Copies blocks out, each plane after plane.
    pub fn export_blocks(&self, blocks: &[u32]) -> Result<Vec<Vec<u8>>, CudaError> {
        self.swap().copy_out(&self.planes, blocks)
    }

    /// Copies a block in, plane after plane.
    pub fn import_block(&self, block: u32, bytes: &[u8]) -> Result<(), CudaError> {
        self.swap().copy_in(&self.planes, block, bytes)
    }

    fn swap(&self) -> MutexGuard<'_, Swap> {
        self.swap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies bytes of one plane out, from `offset` on.
    pub fn download(&self, plane: usize, offset: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.planes[plane].download(offset, bytes)
    }

    /// Copies bytes of one plane in, from `offset` on.
    pub fn upload(&self, plane: usize, offset: usize, bytes: &[u8]) -> Result<(), CudaError> {
        self.planes[plane].upload(offset, bytes)
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
