"""What tests share: launchers of jobs, the Pythons of this machine, reports of benchmarks.

The repository's root is on the path of every Python that runs tests: pytest.ini and conftest.py
put it there, and tools/dev for scripts.
"""
