"""`make test-packaging`: builds the sdist and the wheel, installs each into a fresh environment, and tries it.

Not part of `make test`: it compiles everything again, for any machine. With ccache that takes a minute or two.
"""
