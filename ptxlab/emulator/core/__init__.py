"""The machine: lanes, registers, memory, the scheduler, and the interfaces of what plugs into it."""
