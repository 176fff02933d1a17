//! Whole blocks between a GPU and the host: through page-locked memory, on a stream beside that of the steps.
//!
//! ```text
//! steps    writes K and V |                 |            | waits for in | reads K and V
//! copies                  | waits, copies out, copies in |
//! host                                      | reads       writes the next block meanwhile
//! ```
//!
//! A block goes out when what was asked for before has written it, and the host waits for that. A block comes in when what was
//! asked for before has read what it replaces, and only the GPU waits: the host goes on to the next, until there is no room for
//! it.

use std::sync::Arc;

use super::{
    CudaError,
    driver::{Driver, HostPtr},
    planes::Plane,
};

/// Page-locked memory for blocks at most; for one at least.
const STAGING_BYTES: usize = 32 << 20;

/// The way of the blocks of one KV storage.
pub struct Swap {
    driver: Arc<dyn Driver>,
    /// Allocated with the first block.
    slots: Option<HostPtr>,
    num_slots: usize,
    /// Slots that the GPU may be reading or writing.
    used: usize,
    block_bytes: usize,
}

impl Swap {
    /// For blocks of so many bytes over all planes.
    pub fn new(driver: &Arc<dyn Driver>, block_bytes: usize) -> Self {
        let num_slots = (STAGING_BYTES / block_bytes.max(1)).max(1);
        Self { driver: Arc::clone(driver), slots: None, num_slots, used: 0, block_bytes }
    }

    fn slots(&mut self) -> Result<HostPtr, CudaError> {
        if let Some(slots) = self.slots {
            return Ok(slots);
        }
        Ok(*self.slots.insert(self.driver.allocate_host(self.num_slots * self.block_bytes)?))
    }

    /// The planes follow each other, and are whole blocks.
    fn check(&self, planes: &[Plane]) {
        let end = planes.iter().fold(0, |end, plane| if plane.start == end { end + plane.len } else { usize::MAX });
        assert_eq!(end, self.block_bytes, "bytes of the planes");
    }

    /// Waits for what the GPU still does with the slots.
    fn drain(&mut self) -> Result<(), CudaError> {
        if self.used > 0 {
            self.driver.finish_copies()?;
            self.used = 0;
        }
        Ok(())
    }

    /// Copies blocks out, each plane after plane.
    ///
    /// # Panics
    /// When a plane has not all of a block, or the planes together have not the bytes that were promised.
    pub fn copy_out(&mut self, planes: &[Plane], blocks: &[u32]) -> Result<Vec<Vec<u8>>, CudaError> {
        self.check(planes);
        let (slots, slot_bytes) = (self.slots()?, self.block_bytes);
        let mut out = Vec::with_capacity(blocks.len());
        for blocks in blocks.chunks(self.num_slots) {
            self.drain()?;
            self.used = blocks.len();
            self.driver.copies_after_steps()?;
            for (slot, block) in blocks.iter().enumerate() {
                for &Plane { ref memory, start, len } in planes {
                    let from = memory.range(*block as usize * len, len);
                    // SAFETY: the slot lies within the slots, the plane's part in it; it is touched by nobody until the copies
                    // are finished.
                    unsafe {
                        let to = HostPtr(slots.0.add(slot * slot_bytes + start));
                        self.driver.copy_out(to, from, len)?;
                    }
                }
            }
            self.drain()?;
            // SAFETY: the slots were written, all of them, and the copies are finished.
            out.extend(
                (0..blocks.len())
                    .map(|slot| unsafe { std::slice::from_raw_parts(slots.0.add(slot * slot_bytes), slot_bytes).to_vec() }),
            );
        }
        Ok(out)
    }

    /// Copies a block in; what is asked of the steps afterwards sees it.
    ///
    /// # Panics
    /// When a plane has not all of the block, or the planes together have not the bytes that were promised, or `bytes` has not.
    pub fn copy_in(&mut self, planes: &[Plane], block: u32, bytes: &[u8]) -> Result<(), CudaError> {
        self.check(planes);
        assert_eq!(bytes.len(), self.block_bytes, "bytes of a block");
        let slots = self.slots()?;
        if self.used == self.num_slots {
            self.drain()?;
        }
        // SAFETY: the slot lies within the slots, and no copy that is not finished uses it.
        let slot = unsafe { HostPtr(slots.0.add(self.used * bytes.len())) };
        self.used += 1;
        // SAFETY: as above; it is as long as `bytes`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot.0, bytes.len()) };
        self.driver.copies_after_steps()?;
        for &Plane { ref memory, start, len } in planes {
            let to = memory.range(block as usize * len, len);
            // SAFETY: the part lies within the slot, which is written to again only when the copies are finished.
            unsafe { self.driver.copy_in(to, HostPtr(slot.0.add(start)), len)? };
        }
        self.driver.steps_after_copies()
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if let Some(slots) = self.slots {
            // A lost device copies no more.
            let _ = self.drain();
            self.driver.free_host(slots);
        }
    }
}
