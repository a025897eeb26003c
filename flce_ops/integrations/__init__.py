"""Other libraries' models; nothing here is loaded by `import flce_ops`."""
