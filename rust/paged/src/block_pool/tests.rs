use super::*;

fn pool(num_blocks: u32) -> BlockPool {
    BlockPool::new(num_blocks, 1, vec![true], BlockHasher::new([0; 32]))
}

fn take(pool: &mut BlockPool, count: usize) -> Vec<BlockId> {
    let mut out = Vec::new();
    pool.get_new_blocks(count, &mut out).unwrap();
    out
}

/// Publishes each block as the next of one chain.
fn publish_chain(pool: &mut BlockPool, blocks: &[BlockId]) {
    let mut node = pool.index_mut().pin_root(b"");
    for (&block, token) in blocks.iter().zip(0u32..) {
        node = pool.index_mut().pin_child(node, &[token]);
        pool.publish(block, node, 0);
    }
    pool.index_mut().unpin(node);
}

#[test]
fn all_advertised_blocks_are_usable_and_the_null_block_is_never_one() {
    let mut pool = pool(3);
    let mut ids = take(&mut pool, 3);
    ids.sort();
    assert_eq!(ids, [BlockId(1), BlockId(2), BlockId(3)]);
    let mut out = Vec::new();
    assert_eq!(pool.get_new_blocks(1, &mut out), Err(PoolError::OutOfBlocks { needed: 1, free: 0 }));
    assert!(out.is_empty());
    assert_eq!(pool.free_blocks(&[BlockId::NULL]), Err(PoolError::NullBlock));
    pool.check_integrity(0).unwrap();
}

/// Defect 6: in a release build the second free appended the block again and the list was corrupt.
#[test]
fn defect_06_double_free_is_refused_and_leaves_the_list_unharmed() {
    let mut pool = pool(4);
    let ids = take(&mut pool, 3);
    pool.free_blocks(&ids[..1]).unwrap();
    let order: Vec<_> = pool.free_block_ids().collect();
    let refused = [
        (vec![ids[1], ids[0]], PoolError::NotAllocated { block: ids[0] }),
        (vec![ids[1], ids[2], ids[1]], PoolError::DuplicateBlock { block: ids[1] }),
        (vec![ids[1], BlockId(9)], PoolError::UnknownBlock { block: BlockId(9), num_blocks: 4 }),
        (vec![ids[2], BlockId::NULL], PoolError::NullBlock),
    ];
    for (list, error) in refused {
        assert_eq!(pool.free_blocks(&list), Err(error));
        assert_eq!(pool.free_block_ids().collect::<Vec<_>>(), order);
        pool.check_integrity(0).unwrap();
    }
    pool.free_blocks(&ids[1..]).unwrap();
    assert_eq!(pool.num_free_blocks(), 4);
    pool.check_integrity(0).unwrap();
}

#[test]
fn a_duplicate_is_refused_even_when_the_block_is_held_twice() {
    let mut pool = pool(2);
    let ids = take(&mut pool, 1);
    pool.touch(ids[0]);
    assert_eq!(pool.free_blocks(&[ids[0], ids[0]]), Err(PoolError::DuplicateBlock { block: ids[0] }));
    assert_eq!(pool.ref_cnt(ids[0]), 2);
}

#[test]
fn uncached_blocks_are_reused_before_cached_ones_and_those_from_the_oldest() {
    let mut pool = pool(5);
    let ids = take(&mut pool, 5);
    publish_chain(&mut pool, &ids[..3]);
    // Tail first, as a request frees them.
    pool.free_blocks(&[ids[2], ids[1], ids[0]]).unwrap();
    pool.free_blocks(&[ids[4], ids[3]]).unwrap();
    assert_eq!(pool.num_cached_blocks(), 3);
    let order: Vec<_> = pool.free_block_ids().collect();
    assert_eq!(order, [ids[3], ids[4], ids[2], ids[1], ids[0]]);
    // A hit takes the root out and puts it last again.
    pool.touch(ids[0]);
    assert_eq!((pool.num_cached_blocks(), pool.num_used_blocks()), (2, 1));
    pool.check_integrity(0).unwrap();
    take(&mut pool, 3);
    assert!(!pool.is_published(ids[2]) && pool.is_published(ids[1]));
    pool.check_integrity(0).unwrap();
}

#[test]
fn a_prefix_is_forgotten_with_its_last_block() {
    let mut pool = pool(3);
    let ids = take(&mut pool, 3);
    publish_chain(&mut pool, &ids);
    pool.free_blocks(&[ids[2], ids[1], ids[0]]).unwrap();
    assert_eq!(pool.index().num_nodes(), 4);
    take(&mut pool, 3);
    assert_eq!(pool.index().num_nodes(), 0);
    pool.check_integrity(0).unwrap();
}
