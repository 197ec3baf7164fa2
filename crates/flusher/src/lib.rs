//! Decides when dirty bytes go to the backing and moves them there.
