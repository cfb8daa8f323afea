"""Parts of tools/dev: machine (programs, environments), build, results, tests, lint."""
