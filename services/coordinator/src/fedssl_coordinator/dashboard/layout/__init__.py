"""The parts that all pages share: the frame, formats of figures, small drawings, and the labels of clients."""
