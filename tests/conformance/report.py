from . import llama_cpp, sglang, vllm
FILES = (*llama_cpp.FILES, *vllm.FILES, *sglang.FILES)
