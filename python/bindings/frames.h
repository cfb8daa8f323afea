// Reads and writes the slots of live Python frames: locals, cells and the value stack.
//
// A frame's slots are one array: first `co_nlocalsplus` locals, cells and free variables, then the
// value stack. The interpreter keeps the depth of the stack of a running frame in a register, so
// only the caller can know how many slots are live: reft._continuation.bytecode computes it from
// the code object. A slot at or above that depth holds garbage and must not be asked for.
//
// Python functions bound here:
//   frames_supported: bool                 this interpreter's frame layout is known (CPython 3.11
//   to 3.13 with a GIL) frame_slots(frame, count, unbound)     list of the first `count` slots;
//   `unbound` stands for an empty one frame_set_slot(frame, index, value, unbound)
//   frame_stack_depth(frame)               depth the interpreter stored, -1 if it did not (running
//   frame) frame_localsplus(frame)                `co_nlocalsplus` generator_position(generator)
//   (instruction in code units, state) of a suspended generator generator_set_position(generator,
//   unit, state, stack)
//                                          moves it there with this value stack; both numbers come
//                                          from generator_position for the same code and Python
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
