// Reads and writes the slots of live Python frames: locals, cells and the value stack.
//
// A frame's slots are one array: first `co_nlocalsplus` locals, cells and free variables, then the
// value stack. The interpreter keeps the depth of the stack of a running frame in a register, so
// only the caller can know how many slots are live: reft._continuation.bytecode computes it from
// the code object. A slot at or above that depth holds garbage and must not be asked for.
//
// Python functions bound here, for CPython 3.11 to 3.13 with a GIL:
//
//   frame_slots(frame, count, unbound)
//       The first `count` slots as a list; `unbound` stands for an empty one.
//   frame_set_slot(frame, index, value, unbound)
//       Writes one slot; `unbound` empties it.
//   frame_entered_from_c(frame)
//       Whether C code stands between a running frame and the Python code that called it.
//   generator_position(generator)
//       (instruction in code units, state) of a suspended generator.
//   generator_set_position(generator, unit, state, stack)
//       Moves a generator there with this value stack. Both numbers come from generator_position
//       for the same code and Python.
//
// Threads: the thread that runs the frame (or, of a suspended generator, any thread), with the GIL.
// Errors: TypeError for what is not a frame or generator, ValueError for a generator that runs or a
// place it does not have, IndexError for a slot outside of the frame, RuntimeError where the layout
// is not known.
#pragma once

#include <pybind11/pybind11.h>

namespace reft {

void bindFrames(pybind11::module_& module);

}  // namespace reft
