// Whole blocks copied within the KV pool, when a forked sequence writes to a block that it shares.
//
//   CTA (p, m): block pairs[p].source -> block pairs[p].destination of plane m; each thread moves 16 bytes at a time
//
// Bytes: 2 block_bytes for each pair and plane. Floor: 128 pairs of Llama-3-8B's blocks (32 tokens, 64 KiB, 64 planes) are 1.07
// GB, at 4.3 TB/s 250 us.
#include "cuda.cuh"

KERNEL(copy_blocks, CopyBlocksArgs, 256, 0) {
    const uint64_t source = args.pairs[2 * blockIdx.x], destination = args.pairs[2 * blockIdx.x + 1];
    uint8_t* plane = args.planes[blockIdx.y];
    const uint4* from = reinterpret_cast<const uint4*>(plane + source * args.block_bytes);
    uint4* to = reinterpret_cast<uint4*>(plane + destination * args.block_bytes);
    for (uint64_t i = threadIdx.x; i < args.block_bytes / 16; i += blockDim.x) to[i] = from[i];
}
