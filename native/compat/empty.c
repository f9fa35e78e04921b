// A library that is nothing but a name: see CMakeLists.txt beside this file.

// ISO C asks for a declaration at least.
typedef int hotmoe_compat_nothing;
