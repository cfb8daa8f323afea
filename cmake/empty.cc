// Stands in for a folder that has no sources yet: CMake wants at least one.
