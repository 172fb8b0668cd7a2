"""The machine: its sockets, cores and memory, and what of them this process may use."""
