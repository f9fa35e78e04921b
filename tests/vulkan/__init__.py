"""The pool on a backend that others wrote: Vulkan, on Mesa's software rasteriser. Run: make test-vulkan."""
