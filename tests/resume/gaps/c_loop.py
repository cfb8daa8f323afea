# state: a loop that C code of a package runs (a compiled extension that calls the training step; of Python, NumPy, pandas, SciPy and tensors' `apply_`, reft refuses such loops)
# result: its collected values and its position are lost
# reported: by a verified resume
import importlib.util
import os
import subprocess
import sysconfig
import tempfile

import torch
from toy import begin, end, parts, say, train

SOURCE = r"""
#include <Python.h>
static PyObject* repeat(PyObject* self, PyObject* args) {
  PyObject* function;
  int times;
  if (!PyArg_ParseTuple(args, "Oi", &function, &times)) return NULL;
  PyObject* results = PyList_New(0);
  for (int i = 0; results && i < times; ++i) {
    PyObject* result = PyObject_CallFunction(function, "i", i);
    if (!result || PyList_Append(results, result)) return NULL;
    Py_DECREF(result);
  }
  return results;
}
static PyMethodDef methods[] = {{"repeat", repeat, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "looping", "", -1, methods};
PyMODINIT_FUNC PyInit_looping(void) { return PyModule_Create(&module); }
"""


def looping():
    """Compiles a package of one function that calls another one again and again."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = os.path.join(folder, "looping.c"), os.path.join(folder, "looping.so")
        with open(source, "w") as file:
            file.write(SOURCE)
        include = f"-I{sysconfig.get_path('include')}"
        subprocess.run(["cc", "-shared", "-fPIC", include, source, "-o", library], check=True)
        spec = importlib.util.spec_from_file_location("looping", library)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


rank = begin()
repeat = looping().repeat
model, optimizer = parts()


def step(number):
    loss = train(model, optimizer, torch.randn(8, 4))
    say(rank, number, loss.hex())
    return loss


losses = repeat(step, 12)
end(rank, model, optimizer, losses)
