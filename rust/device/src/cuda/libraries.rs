//! Where NVIDIA's libraries are: in the wheels of the extra `cuda`, in the system, or under CUDA_HOME, in that order.

use std::path::{Path, PathBuf};

use super::CudaError;

/// A shared library that is loaded when it is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// Matrix products.
    CublasLt,
}

impl Library {
    /// Every library.
    pub const ALL: [Self; 1] = [Self::CublasLt];

    /// As people call it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CublasLt => "cuBLASLt",
        }
    }

    /// The file that is loaded.
    pub const fn file_name(self) -> &'static str {
        match self {
            Self::CublasLt => "libcublasLt.so.13",
        }
    }
}

/// The folders outside of the system's own; the caller says, nothing is read from the environment here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LibraryPaths {
    /// Folders that Python packages are in, such as site-packages; wheels put libraries into `nvidia/cu13/lib` below them.
    pub packages: Vec<PathBuf>,
    /// A CUDA toolkit.
    pub cuda_home: Option<PathBuf>,
}

impl LibraryPaths {
    /// What is tried for a library, in order; a bare file name stands for the system's folders.
    fn candidates(&self, library: Library) -> Vec<PathBuf> {
        let file = library.file_name();
        let wheels = self.packages.iter().map(|folder| folder.join("nvidia/cu13/lib").join(file));
        let toolkit = self.cuda_home.iter().flat_map(|home| ["lib64", "lib"].map(|lib| home.join(lib).join(file)));
        wheels.chain([PathBuf::from(file)]).chain(toolkit).collect()
    }

    /// The first candidate that `opens`.
    ///
    /// Errors: [`CudaError::MissingLibrary`], with the places.
    fn find(&self, library: Library, opens: impl Fn(&Path) -> bool) -> Result<PathBuf, CudaError> {
        let found = self.candidates(library).into_iter().find(|path| opens(path));
        found.ok_or_else(|| CudaError::MissingLibrary { library: library.file_name().into(), looked_in: self.places() })
    }

    /// Where a library lies: a path, or its bare name when the system finds it. It stays loaded.
    ///
    /// Errors: [`CudaError::MissingLibrary`].
    pub fn locate(&self, library: Library) -> Result<PathBuf, CudaError> {
        self.find(library, |path| {
            // SAFETY: initialisers of NVIDIA's libraries have no preconditions; the library is never unloaded.
            unsafe { libloading::Library::new(path) }.map(std::mem::forget).is_ok()
        })
    }

    fn places(&self) -> String {
        let with_wheels: Vec<_> = self.packages.iter().map(|p| p.join("nvidia/cu13/lib")).filter(|p| p.is_dir()).collect();
        let wheels = match with_wheels.first() {
            Some(folder) => format!("NVIDIA's wheels ({})", folder.display()),
            None => "NVIDIA's wheels (none are installed)".into(),
        };
        let home = self.cuda_home.as_ref().map_or("not set".into(), |home| home.display().to_string());
        format!("{wheels}, the system's library folders, CUDA_HOME ({home})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths() -> LibraryPaths {
        LibraryPaths { packages: vec!["/a".into(), "/b".into()], cuda_home: Some("/opt/cuda".into()) }
    }

    #[test]
    fn wheels_go_before_the_system_which_goes_before_cuda_home() {
        let order = [
            "/a/nvidia/cu13/lib/libcublasLt.so.13",
            "/b/nvidia/cu13/lib/libcublasLt.so.13",
            "libcublasLt.so.13",
            "/opt/cuda/lib64/libcublasLt.so.13",
            "/opt/cuda/lib/libcublasLt.so.13",
        ];
        for (i, first) in order.iter().enumerate() {
            let there = |path: &Path| order[i..].iter().any(|p| Path::new(p) == path);
            assert_eq!(paths().find(Library::CublasLt, there), Ok(PathBuf::from(first)));
        }
    }

    #[test]
    fn a_missing_library_is_named_with_every_place_and_what_brings_it() {
        let text = paths().find(Library::CublasLt, |_| false).unwrap_err().to_string();
        for part in ["libcublasLt.so.13", "NVIDIA's wheels (none are installed)", "system", "/opt/cuda", "mistral-paged[cuda]"] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
        let text = LibraryPaths::default().find(Library::CublasLt, |_| false).unwrap_err().to_string();
        assert!(text.contains("CUDA_HOME (not set)"), "{text}");
    }

    #[test]
    fn a_folder_that_is_no_library_is_passed_over() {
        let folder = std::env::temp_dir();
        let paths = LibraryPaths { packages: vec![folder.clone()], cuda_home: Some(folder) };
        match paths.locate(Library::CublasLt) {
            // A machine may have it.
            Ok(path) => assert_eq!(path, Path::new("libcublasLt.so.13")),
            Err(error) => assert!(matches!(error, CudaError::MissingLibrary { .. }), "{error}"),
        }
    }
}
