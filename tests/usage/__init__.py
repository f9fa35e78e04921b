"""Usage scripts as people write them for llama-cpp-python, run on both packages, with a pool and without."""
