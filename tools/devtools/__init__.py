"""What tools/dev is made of: machine (programs, virtual environments), build, results, tests, lint."""
