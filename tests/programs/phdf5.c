/* Parallel HDF5: a dataset of which every rank writes its rows (collectively), a chunked one written
 * independently, attributes; closed, opened anew by all and compared.
 *   phdf5 FILE */
#include <hdf5.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int rank, size;

enum { ROWS = 64, COLUMNS = 1001 };

static double value(hsize_t row, hsize_t column, int set)
{
    return (double)row * 10007 + (double)column + set * 0.25;
}

static void fail(const char *what)
{
    fprintf(stderr, "rank %d: %s\n", rank, what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static hid_t ok(hid_t id, const char *what)
{
    if (id < 0)
        fail(what);
    return id;
}

static void rows_of(int who, hsize_t *start, hsize_t *count)
{
    start[0] = (hsize_t)who * ROWS, start[1] = 0;
    count[0] = ROWS, count[1] = COLUMNS;
}

static void transfer(hid_t file, const char *name, int set, int who, int writing, int collective)
{
    static double data[ROWS][COLUMNS];
    hsize_t start[2], count[2];
    rows_of(who, start, count);
    hid_t dataset = ok(H5Dopen2(file, name, H5P_DEFAULT), "open dataset");
    hid_t there = ok(H5Dget_space(dataset), "space");
    hid_t here = ok(H5Screate_simple(2, count, NULL), "space");
    hid_t how = ok(H5Pcreate(H5P_DATASET_XFER), "list");
    H5Pset_dxpl_mpio(how, collective ? H5FD_MPIO_COLLECTIVE : H5FD_MPIO_INDEPENDENT);
    H5Sselect_hyperslab(there, H5S_SELECT_SET, start, NULL, count, NULL);
    if (writing) {
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < COLUMNS; c++)
                data[r][c] = value(start[0] + r, c, set);
        ok(H5Dwrite(dataset, H5T_NATIVE_DOUBLE, here, there, how, data), "write");
    } else {
        ok(H5Dread(dataset, H5T_NATIVE_DOUBLE, here, there, how, data), "read");
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < COLUMNS; c++)
                if (data[r][c] != value(start[0] + r, c, set))
                    fail("a value is wrong");
    }
    H5Pclose(how), H5Sclose(here), H5Sclose(there), H5Dclose(dataset);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc != 2)
        fail("usage: phdf5 FILE");
    hid_t access = ok(H5Pcreate(H5P_FILE_ACCESS), "list");
    H5Pset_fapl_mpio(access, MPI_COMM_WORLD, MPI_INFO_NULL);

    hid_t file = ok(H5Fcreate(argv[1], H5F_ACC_TRUNC, H5P_DEFAULT, access), "create");
    hsize_t dims[2] = {(hsize_t)size * ROWS, COLUMNS}, chunk[2] = {24, 300};
    hid_t space = ok(H5Screate_simple(2, dims, NULL), "space");
    hid_t chunked = ok(H5Pcreate(H5P_DATASET_CREATE), "list");
    H5Pset_chunk(chunked, 2, chunk);
    const char *names[2] = {"contiguous", "chunked"};
    for (int n = 0; n < 2; n++) {
        hid_t made = ok(H5Dcreate2(file, names[n], H5T_NATIVE_DOUBLE, space, H5P_DEFAULT,
                                   n ? chunked : H5P_DEFAULT, H5P_DEFAULT), "dataset");
        hid_t scalar = ok(H5Screate(H5S_SCALAR), "space");
        hid_t attribute = ok(H5Acreate2(made, "set", H5T_NATIVE_INT, scalar, H5P_DEFAULT, H5P_DEFAULT),
                             "attribute");
        ok(H5Awrite(attribute, H5T_NATIVE_INT, &n), "attribute");
        H5Aclose(attribute), H5Sclose(scalar), H5Dclose(made);
    }
    transfer(file, "contiguous", 0, rank, 1, 1);
    transfer(file, "chunked", 1, rank, 1, 1);
    ok(H5Fclose(file), "close");
    MPI_Barrier(MPI_COMM_WORLD);

    file = ok(H5Fopen(argv[1], H5F_ACC_RDWR, access), "open");
    transfer(file, "contiguous", 0, (rank + 1) % size, 0, 0);
    transfer(file, "chunked", 1, (rank + 1) % size, 0, 1);
    MPI_Barrier(MPI_COMM_WORLD);
    transfer(file, "contiguous", 2, rank, 1, 0);
    ok(H5Fclose(file), "close");
    MPI_Barrier(MPI_COMM_WORLD);

    file = ok(H5Fopen(argv[1], H5F_ACC_RDONLY, access), "open");
    for (int who = 0; who < size; who++)
        transfer(file, "contiguous", 2, who, 0, 0);
    ok(H5Fclose(file), "close");
    MPI_Finalize();
    return 0;
}
