"""What a framework needs beside the core, a module for each; the package itself imports none of them."""
