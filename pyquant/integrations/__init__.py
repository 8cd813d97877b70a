"""Other libraries' files and classes, one file a library. Nothing of it is imported by `import pyquant`."""
