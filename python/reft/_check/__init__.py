"""`reft check`: which nodes, network cards and links of a job are at fault, before it starts.

The decision is pure (`plan`, `stats`, `judge`, `course`: no clock, no I/O), so that a campaign can
run it on simulated nodes. What measures and talks is beside it (`local`, `links`, `meeting`,
`node`).
"""
